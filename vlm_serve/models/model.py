"""A language model with its vision tower: one forward over packed tokens of many sequences."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.checks import check_folds
from vlm_serve.kernels.dispatch import compiled_kernels
from vlm_serve.kernels.linear import Linear, dense
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.kernels.norms import Normed
from vlm_serve.kernels.ranks import ALONE, Ranks
from vlm_serve.kernels.tuning import fixed_steps
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.models.compiled_step import CompiledStep
from vlm_serve.models.config import Changes
from vlm_serve.models.decoder import Decoder
from vlm_serve.models.files import resolve_checkpoint
from vlm_serve.models.identity import Origin, digests_of, fingerprint, tensor_digest
from vlm_serve.models.mtp import Predictor
from vlm_serve.models.parts.base import Step
from vlm_serve.models.program import Program
from vlm_serve.models.registry import read_spec
from vlm_serve.models.spec import FixedTower, ModelSpec
from vlm_serve.models.vision import Grid
from vlm_serve.models.weights import Weights
from vlm_serve.system.host_memory import release_freed_memory

_MOST_UINT8_EXPERTS = 256


_log = logging.getLogger(__name__)
_COUNTS = ("num_hidden_layers", "depth")


class Model:
    """A loaded checkpoint. It holds no state of any sequence; the caches do.

    Attributes:
        spec: the architecture.
        fingerprint: 32 bytes that identify the weights and the config.
        tower_fingerprint: the same of the vision tower's tensors alone, and of the whole config.
        origin: what its weights were read from; only the first rank keeps tensors.
        dtype: of activations and of everything else.
        device: of its weights and computation.
        compiled: whether compiled CPU code multiplies.
        ranks: the ranks that share its language model; the vision tower is whole on each of them.
        drafts: whether its multi-token-prediction layer is loaded; forwards then report hidden
            states.
        quantised: names of the weights that the checkpoint holds as codes.
        modules: the projections that adapters can change.
        tower_names: the tensors of the vision tower, by their names in the files.
        pooled: the tokens whose logits it computes alone; an empty tuple: hidden states behind the
            last norm, a number: as many labels' logits take their place; None: all tokens.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        identity: bytes,
        *,
        drafts: bool = False,
        pooled: tuple[int, ...] | int | None = None,
    ) -> None:
        self.spec = spec
        self.fingerprint = self.tower_fingerprint = identity
        self.origin = Origin()
        self.dtype = weights.compute_dtype
        self.device = weights.device
        self.compiled = weights.compiled
        self.ranks = weights.ranks
        self.pooled = pooled
        embeds = pooled == ()
        other = spec.tied_embeddings or embeds or isinstance(pooled, int)
        head = None if other else weights.head_name()
        instead = _unit(spec.hidden_size, weights) if embeds else pooled
        self._decoder = Decoder(spec, weights, weights.text_prefix, head, instead)
        self._inv_freq = spec.rope.frequencies().to(self.device)
        self._predictor = Predictor(spec, weights) if drafts else None
        self.drafts = drafts
        self._vision, read = None, weights.read
        if spec.vision is not None:
            prefix = weights.vision_prefix(spec.vision.anchor)
            self._vision = spec.vision.load(weights, prefix, weights.compute_dtype)
        self.tower_names = weights.read - read
        self.quantised = frozenset(weights.quantised)
        self.modules = weights.modules
        self._fixed_steps = fixed_steps(self.device)
        self._caches: CacheTensors | None = None
        self._bound: tuple[Any, ...] = ()
        self._compiled_step: CompiledStep | None = None
        self._dropped_step = False

    @property
    def columns(self) -> int:
        """Numbers of a row of `ForwardOutput.logits`: logits of the vocabulary, or a vector."""
        return self.spec.vocab_size if self.pooled is None else self._decoder.head.columns

    def compile_steps(self, caches: CacheTensors) -> None:
        """Compute each later step over these pools by one call of compiled code.

        Raises:
            BuildError: it can be neither found nor built here.
            UnsupportedError: it does not support this model, or such pools.
        """
        spec, program = self.spec, Program(self.dtype, self.spec.hidden_size, self.ranks)
        table = self._decoder.embedding
        whole = len(table) == spec.vocab_size and table.is_contiguous()
        if table.dtype == self.dtype and whole and spec.embedding_scale == 1.0:
            program.look_up(table)
        rope, frequencies = spec.rope, self._inv_freq
        program.rotate(frequencies, rope.axes, rope.scale)
        layers = zip(self._decoder.layers, self._bind(caches), strict=True)
        last = None if self.drafts else self._decoder.last_mixing
        for index, (layer, cache) in enumerate(layers):
            layer.lower(program, cache, last=layer is last)
            if index < spec.media_features:
                program.features(index)
        if not self.drafts:
            program.keep(program.normed, 0, reporting=True)
        program.norm(self._decoder.norm, spec.residual_eps)
        if self.drafts:
            program.hidden()
            for reporting in (False, True):
                program.keep(program.normed, spec.hidden_size, reporting=reporting)
        program.logits(self._decoder.head)
        self._compiled_step = CompiledStep(program, caches)
        if self._predictor is not None:
            self._predictor.compile(caches, self._inv_freq, self._decoder.head)

    def forward(self, batch: ForwardBatch, caches: CacheTensors) -> ForwardOutput:
        """Run one step: read and write the caches, return the requested logits. With several ranks,
        the first one returns all logits and the others their part.

        Raises whatever an op raises; the state rows written so far are then undefined.
        """
        if caches is self._caches and self._compiled_step is not None:
            known = self._compiled_step.looks_up and not batch.media
            x = None if known else self._embed(batch)
            logits, ids, hidden, best = self._compiled_step.run(batch, x)
            whole = self.ranks.columns(logits, self.spec.vocab_size)
            experts = None if ids is None else self._narrow(ids)
            return ForwardOutput(whole, experts, hidden, best if whole is logits else None)
        with compiled_kernels(self.compiled):
            return self._by_ops(batch, caches)

    @torch.inference_mode()
    def draft(
        self, batch: ForwardBatch, before: torch.Tensor, caches: CacheTensors
    ) -> ForwardOutput:
        """Run one forward of the multi-token-prediction layer, which writes its own KV.

        Args:
            batch: the tokens as slices of prefills without state rows; none is a sequence's first
                token. `positions` are those of the preceding tokens, and `starts` count the keys
                before a slice, one less than the tokens. By ops, tokens may be decode tokens
                instead; their `kv_lens` count the unused first slot too.
            before: `[T, hidden]`, the input before each token: the model's hidden state, or this
                layer's own output for consecutive drafts.
            caches: the pools.

        Returns:
            Logits of the next token, and hidden states, of the batch's `logit_rows`.
        """
        assert self._predictor is not None, "loaded without drafts"
        with compiled_kernels(self.compiled):
            return self._predictor.forward(
                batch, self._embed(batch), before, caches, self._inv_freq, self._decoder.head
            )

    @torch.inference_mode()
    def fold(self, caches: CacheTensors, folds: Sequence[tuple[int, int, int]]) -> None:
        """Fold the updates of drafted tokens into state rows: (row, first update, count) each, with
        all rows and updates distinct."""
        check_folds(folds, caches.num_rows, caches.num_updates)
        bound = self._bind(caches)
        if self._compiled_step is not None:
            self._compiled_step.fold(folds)
            return
        with compiled_kernels(self.compiled):
            for layer, cache in zip(self._decoder.layers, bound, strict=True):
                layer.fold(cache, folds)

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        x = self._look_up(batch.token_ids).to(self.dtype)
        if self.spec.embedding_scale != 1.0:
            x *= self.spec.embedding_scale
        for offset, rows in batch.media:
            x[offset : offset + rows.shape[0]] = rows[:, : self.spec.hidden_size]
        return x

    def _look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the embedding table; a rank may hold only its part of the vocabulary."""
        table, vocab = self._decoder.embedding, self.spec.vocab_size
        if len(table) == vocab:
            return F.embedding(token_ids, table)
        share = self.ranks.share(vocab)
        known = (token_ids >= share.start) & (token_ids < share.stop)
        rows = F.embedding(torch.where(known, token_ids - share.start, 0), table).float()
        return self.ranks.sum(rows * known[:, None])

    def _add_features(self, x: torch.Tensor, batch: ForwardBatch, index: int) -> None:
        """Add the media's features for a layer to the residual behind it."""
        hidden = self.spec.hidden_size
        for offset, rows in batch.media:
            first = (1 + index) * hidden
            x[offset : offset + rows.shape[0]] += rows[:, first : first + hidden]

    @torch.inference_mode()
    def _by_ops(self, batch: ForwardBatch, caches: CacheTensors) -> ForwardOutput:
        if self._fixed_steps and batch.prefill is not None:
            batch = replace(batch, deterministic=True)
        x, layers = self._embed(batch), self._decoder.layers
        rope = self.spec.rope
        cos, sin = rope.cos_sin(batch.positions, self._inv_freq)
        step = Step(
            decode=batch.decode,
            prefill=batch.prefill,
            verify=batch.verify,
            slots=batch.slots,
            cos=cos,
            sin=sin,
            deterministic=batch.deterministic,
            changes=batch.changes,
        )
        routed: list[torch.Tensor] = []
        # After the last token mixer only rows with requested logits are needed.
        whole = batch.capture_experts or self.drafts
        last = None if whole else self._decoder.last_mixing
        for index, (layer, cache) in enumerate(zip(layers, self._bind(caches), strict=True)):
            keep = batch.logit_rows if layer is last else None
            x, step, ids = layer.apply(x, cache, step, keep)
            routed += ids
            if index < self.spec.media_features:
                self._add_features(x, batch, index)
        if batch.capture_experts and not self.drafts:
            x, step = x[batch.logit_rows], step.kept(batch.logit_rows)
        head = self._decoder.head
        hidden, normed = None, Normed(x, self._decoder.norm, self.spec.residual_eps)
        if self.drafts:
            hidden, step = normed.rows, step.kept(batch.logit_rows)
            rows = hidden[batch.logit_rows]
            logits = head(rows, deterministic=batch.deterministic, changes=step.changes).float()
        else:
            logits = head.of_norm(
                normed, widened=True, deterministic=batch.deterministic, changes=step.changes
            )
        logits = self.ranks.columns(logits, self.spec.vocab_size)
        if not routed or not batch.capture_experts:
            return ForwardOutput(logits, hidden=hidden)
        return ForwardOutput(logits, self._narrow(torch.stack(routed, dim=1)), hidden)

    def encode_media(
        self,
        patches: torch.Tensor,
        grids: Sequence[Grid],
        merges: Sequence[int] | None = None,
        deterministic: bool = False,
        changes: AdapterChanges | None = None,
    ) -> list[torch.Tensor]:
        """Return the embeddings of media spans; see `Tower.encode`. `changes`: their adapter."""
        assert self._vision is not None, "a text-only model has no vision tower"
        with compiled_kernels(self.compiled):
            return self._vision.encode(
                patches, grids, merges, deterministic=deterministic, changes=changes
            )

    def fixed_tower(self, most: int) -> FixedTower | None:
        """Return the vision tower over fixed inputs, see `Tower.fixed`; None without a tower."""
        return None if self._vision is None else self._vision.fixed(most)

    def embedding_like(self, grid: Grid, merge: int) -> torch.Tensor:
        """Return a tensor without content, with the shape and dtype of `encode_media`'s result
        for a grid whose squares of `merge` patches a side become tokens."""
        rows = grid[1] * grid[2] // merge**2
        return torch.empty(rows, self.spec.embedding_width, dtype=self.dtype, device="meta")

    def take_weights(self, other: Model) -> None:
        """Compute each later step with the weights of another model of the same spec and types, and
        over the pools to which that is bound."""
        assert self.spec == other.spec and self.dtype == other.dtype
        self._decoder, self._predictor = other._decoder, other._predictor
        self._vision, self.tower_names = other._vision, other.tower_names
        self.fingerprint, self.tower_fingerprint = other.fingerprint, other.tower_fingerprint
        self.modules, self.quantised = other.modules, other.quantised
        self.origin = other.origin
        self._caches, self._bound = other._caches, other._bound
        self._compiled_step, self._dropped_step = other._compiled_step, False

    def bind_like(self, other: Model) -> None:
        """Bind the pools of another model, and compile steps if that one has.

        Raises as `compile_steps` does.
        """
        compiled = other._compiled_step is not None or other._dropped_step
        if other._caches is not None and compiled:
            self.compile_steps(other._caches)

    def drop_weights(self) -> None:
        """Let go of all weights. No step may run until `take_weights` has brought others."""
        del self._decoder, self._predictor, self._vision
        self._dropped_step = self._compiled_step is not None
        self._bound, self._compiled_step = (), None

    def unbind(self) -> None:
        """Drop the pools of the last step; the next one binds its own."""
        self._caches, self._compiled_step, self._bound = None, None, ()

    def _bind(self, caches: CacheTensors) -> tuple[Any, ...]:
        """Return each layer's part of the pools, rebuilt only when the pools change."""
        if self._caches is not caches:
            self._caches, self._compiled_step = caches, None
            self._bound = tuple(
                layer.bind(caches.of_layer(index))
                for index, layer in enumerate(self._decoder.layers)
            )
        return self._bound

    def _narrow(self, ids: torch.Tensor) -> torch.Tensor:
        routing = self.spec.routing
        assert routing is not None, "only routers choose experts"
        return ids.to(torch.uint8 if routing.num_experts <= _MOST_UINT8_EXPERTS else torch.int16)


def _unit(size: int, weights: Weights) -> Linear:
    """Return the projection that leaves its input as it is, exactly."""
    unit = torch.eye(size, dtype=weights.dtype, device=weights.device)
    return dense(unit, compiled=weights.compiled)


def load_model(
    path: Path | str,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    compute_dtype: torch.dtype | None = None,
    compiled: bool = False,
    ranks: Ranks = ALONE,
    drafts: bool = False,
    bits: int | None = None,
    dynamic: bool = False,
    changes: Changes | None = None,
    pooled: tuple[int, ...] | int | None = None,
    spec: ModelSpec | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    keeps_files: bool = True,
) -> Model:
    """Load a checkpoint.

    Args:
        path: directory or hub id.
        dtype: float32, bfloat16 or float16, of the projections in memory; the checkpoint's weights
            are converted.
        device: for the model.
        compute_dtype: of activations; `dtype` if it is not given. Only compiled code takes another
            one: float32 with any dtype.
        compiled: whether compiled CPU code computes everything that it supports.
        ranks: the ranks that share the model: only this rank's part is read.
        drafts: whether to load its multi-token-prediction layer too; the spec has one.
        bits: 8, 6 or 4: precision to which plain weights are quantised, where their parts allow.
        dynamic: whether compiled code quantises activations beside integer codes as well.
        changes: of its config.json.
        pooled: see `Model`; on one rank, without drafts.
        spec: of another checkpoint with the same config, with those changes; None: it is read.
        tensors, keeps_files: see `Weights`.

    Raises:
        ModelNotFoundError: no such checkpoint.
        CheckpointError: it is incomplete, broken or of an unsupported kind.
        ConfigError: a change has no effect.
        BuildError: compiled code is wanted and unavailable.
    """
    directory = resolve_checkpoint(path)
    spec = spec or read_spec(directory, changes or Changes())
    weights = Weights(
        directory,
        dtype,
        torch.device(device),
        compute_dtype=compute_dtype,
        compiled=compiled,
        ranks=ranks,
        scheme=spec.quantization,
        bits=bits,
        dynamic=dynamic,
        tensors=tensors,
        keeps_files=keeps_files,
    )
    check_defaults(spec, weights)
    given = {name: tensor_digest(name, tensor) for name, tensor in (tensors or {}).items()}
    digests = digests_of(directory) | given
    identity = partial(fingerprint, directory, spec.config, digests)
    model = Model(spec, weights, identity(), drafts=drafts, pooled=pooled)
    model.tower_fingerprint = identity(only=model.tower_names)
    model.origin = Origin(directory, {} if ranks.rank else tensors or {}, digests)
    weights.tell_unread()
    release_freed_memory(regrow=True)  # release the memory of temporary pieces of weights
    return model


def check_defaults(spec: ModelSpec, weights: Weights) -> None:
    """Log the defaults that were used, and refuse a number of layers that the tensors contradict.

    Other sizes are compared when their tensors are read; surplus layers would silently not be read.

    Raises CheckpointError that names the field.
    """
    fields: dict[str, list[str]] = defaultdict(list)
    for place, source in spec.defaulted.items():
        fields[source].append(place)
        section, _, name = place.rpartition(".")
        if name in _COUNTS:
            of_vision = section == "vision_config"
            _check_count(spec, weights, place, source, of_vision=of_vision)
    for source, names in fields.items():
        _log.info("config.json leaves %s to transformers' %s", ", ".join(names), source)


def _check_count(
    spec: ModelSpec, weights: Weights, place: str, source: str, *, of_vision: bool
) -> None:
    wanted, start = len(spec.layers), f"{weights.text_prefix}layers."
    if of_vision:
        assert spec.vision is not None
        wanted = spec.vision.depth
        start = weights.vision_prefix(spec.vision.anchor) + spec.vision.layers
    count = weights.count(start)
    if count != wanted:
        raise CheckpointError(
            f"the checkpoint has tensors of {count} layers ({start}*), but config.json lacks "
            f"{place}, and the default of transformers' {source} is {wanted}"
        )
