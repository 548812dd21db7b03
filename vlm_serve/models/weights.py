"""Reads weights: memory-mapped files in, tensors of the wanted dtype out."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear import Linear, Part, Shard, load, runs
from vlm_serve.kernels.linear.base import shape as shape_of_parts
from vlm_serve.kernels.linear.codes import Codes, IntegerCodes
from vlm_serve.kernels.linear.quantising import quantised
from vlm_serve.kernels.linear.stored_codes import Stored, stored
from vlm_serve.kernels.ranks import ALONE, Ranks
from vlm_serve.models.adapters.changes import Modules
from vlm_serve.models.config import mismatch
from vlm_serve.models.files import TensorFile, TensorsInMemory, open_files
from vlm_serve.models.quantization.base import Format, Names, loading_format, pieces
from vlm_serve.models.quantization.fields import PLAIN
from vlm_serve.models.quantization.float8 import widened
from vlm_serve.models.quantization.scheme import QuantScheme
from vlm_serve.system.host_memory import release_freed_memory

_TEXT_PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "thinker.model.",
    "model.",
    "backbone.",
    "",
)
_VISION_PREFIXES = (
    *("model.visual.", "visual.", "thinker.visual.", "model.", ""),
    *("model.vision_tower.", "model.vision_tower.vision_model.", "vision_tower.vision_model."),
    "vision_tower.",
)
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "thinker.lm_head.weight")
_log = logging.getLogger(__name__)
_LEFT = re.compile(r".*\b((mtp|lm_head|audio_tower|talker|code2wav)\.|\w+_scale$).*|.*\.inv_freq")
"""Tensors that are left unread with reason: of drafts, tied heads, quantised activations, hearing
and speaking."""
_TELL_SECONDS = 2.0
_RELEASE_BYTES = 64 << 20
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Weights:
    """The tensors of a checkpoint. Files are mapped, and each tensor is copied once, directly
    into the memory of the model.

    Args:
        path: checkpoint directory.
        dtype: of projections and lookup tables in memory.
        device: for all tensors.
        compute_dtype: of everything else, and of activations; `dtype` if it is not given.
        compiled: whether compiled CPU code multiplies.
        ranks: the ranks that share the model. Other ranks' parts are not read.
        scheme: the config's description of quantised weights.
        bits: precision to which plain weights are quantised, where their parts allow; None: they
            are not.
        dynamic: whether activations beside integer codes are quantised as well.
        tensors: tensors in the place of those in the files, by their names there.
        keeps_files: whether a lookup table may stay in its file.

    Attributes:
        quantised: names of the weights read as codes, as if they were dense.
        modules: the projections that adapters can change.

    Raises:
        CheckpointError: from every method: a file is missing or broken, a tensor is missing or has
            another shape or dtype than the config implies, or values that are no numbers.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        compute_dtype: torch.dtype | None = None,
        compiled: bool = False,
        ranks: Ranks = ALONE,
        scheme: QuantScheme | None = None,
        bits: int | None = None,
        dynamic: bool = False,
        tensors: Mapping[str, torch.Tensor] | None = None,
        keeps_files: bool = True,
    ) -> None:
        self.ranks = ranks
        self._keeps_files = keeps_files
        self.dtype = dtype
        self.dynamic = dynamic
        self._bits = bits
        self.quantised: set[str] = set()
        self.modules = Modules()
        self._scheme = scheme
        self.compute_dtype = compute_dtype or dtype
        self.device = device
        self.compiled = compiled
        self._used: set[str] = set()
        self._files: dict[str, TensorFile] = {}
        self._checked: set[str] = set()
        self._read = self._total = self._released = 0
        self._told = time.monotonic()
        for file in open_files(path):
            self._files.update(dict.fromkeys(file.names(), file))
            self._total += file.nbytes
        if tensors:
            self._replace(TensorsInMemory(tensors))
        self.text_prefix = self._prefix(_TEXT_PREFIXES, "embed_tokens.weight")

    def _replace(self, given: TensorsInMemory) -> None:
        """Take tensors in the place of those in the files."""
        unknown = sorted(given.source(name) for name in given.names() if name not in self._files)
        if unknown:
            raise CheckpointError(
                f"the checkpoint has no {unknown[0][:200]} that could be replaced"
            )
        self._files.update(dict.fromkeys(given.names(), given))

    def _prefix(self, prefixes: Sequence[str], anchor: str) -> str:
        for prefix in prefixes:
            if prefix + anchor in self._files:
                return prefix
        raise CheckpointError(f"the checkpoint has no {anchor}")

    def vision_prefix(self, anchor: str) -> str:
        """Return the prefix of the vision tower's names; `anchor`: one of them, without it."""
        return self._prefix(_VISION_PREFIXES, anchor)

    def head_name(self) -> str:
        """Return the name of the output projection of a model without tied embeddings."""
        for name in HEAD_NAMES:
            if name in self._files or self._format(name) is not None:
                return name
        raise CheckpointError("the checkpoint has no lm_head.weight and does not tie embeddings")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def count(self, start: str) -> int:
        """Count the distinct numbers that follow a prefix of names, such as those of layers."""
        names = (name for name in self._files if name.startswith(start))
        return len({name[len(start) :].partition(".")[0] for name in names})

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape in the checkpoint; None if it has no such tensor."""
        file = self._files.get(name)
        if file is None:
            return None
        return file.shape(name)

    def stored(self, name: str) -> torch.Tensor:
        """Return a tensor as stored in its file, whatever its shape and dtype."""
        if name not in self._files:
            raise CheckpointError(self._missing(name))
        self._used.add(name)
        return self._files[name].tensor(name)

    def _missing(self, name: str) -> str:
        names = Names(name)
        inner = names.sibling("base_layer.weight")
        if inner in self._files:
            return f"{inner} is part of an adapter: merge it into its model and save that"
        if names.sibling("B") in self._files:
            return f"{names.sibling('B')} is packed for Marlin's kernels: {PLAIN}"
        packed = names.sibling("qweight"), names.of_weight("packed")
        packed_name = next((name for name in packed if name in self._files), None)
        if packed_name is None or self._scheme is not None:
            return f"the checkpoint has no {name}"
        return f"{packed_name} is quantised, but config.json has no quantization_config"

    def _format(self, weight: str) -> Format | None:
        return None if self._scheme is None else self._scheme.stored_format(weight, self)

    def codes(self, part: Part, shard: Shard | None) -> Iterator[Codes] | None:
        """Return the codes of a part's rows, None if it is dense; checks everything but the
        codes at once."""
        format_ = self._format(part.name)
        if format_ is None:
            return self._made_codes(part, shard)
        opened = format_.open(self, part)
        if part.name not in self.quantised:
            self.quantised.add(part.name)
            self._tell(format_.nbytes(*part.sizes))
        return pieces(opened, part, shard)

    def _made_codes(self, part: Part, shard: Shard | None) -> Iterator[Codes] | None:
        """Return the codes of a plain weight that is to be quantised. A shard of the depth has
        those of whole rows."""
        depth = shape_of_parts([part], shard)[1]
        if self._bits is None or loading_format(self._bits, part, depth) is None:
            return None
        columns = range(part.sizes[1])
        kind = loading_format(self._bits, part, len(columns))
        assert kind is not None, "groups of a shard are groups of the row"
        if shard is not None and shard.axis == 1:
            columns, shard = shard.of(len(columns)), None
        return quantised(part.pieces(self, shard), kind.bits, kind.group, columns)

    def mapped(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor as stored in its file: read-only memory, paged in when touched."""
        tensor = self.stored(name)
        if Names(name).sibling("biases") in self and tensor.dtype == torch.uint32:
            raise CheckpointError(f"{name} is MLX's, whose weights are not read: {PLAIN}")
        if tuple(tensor.shape) != tuple(shape):
            raise CheckpointError(mismatch(name, tensor.shape, shape))
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(f"{name} is {tensor.dtype}, which is not supported")
        if name not in self._checked:
            _check_finite(name, tensor)
            self._checked.add(name)
            self._tell(tensor.nbytes)
        return tensor

    def _tell(self, num_bytes: int) -> None:
        """Add to the bytes read so far, and log the progress now and then."""
        self._read += num_bytes
        now = time.monotonic()
        if now - self._told >= _TELL_SECONDS:
            self._told = now
            _log.info("%d %% of the weights are read", 100 * self._read // max(1, self._total))

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        rows: Sequence[range] = (),
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return a tensor in its own memory, by default in the dtype of activations; only the
        named rows, stacked, if any are named."""
        whole = self._whole(name, shape)
        if rows:
            whole = torch.cat([whole[span.start : span.stop] for span in rows])
        return whole.to(self.device, dtype or self.compute_dtype, copy=not rows)

    def _whole(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor that is no projection. A convolution may be stored in FP8."""
        if name not in self or self.stored(name).dtype != torch.float8_e4m3fn:
            return self.mapped(name, shape)
        if self.shape_of(name) != tuple(shape):
            raise CheckpointError(mismatch(name, self.shape_of(name) or (), shape))
        return widened(self, name)

    def linear(
        self, *parts: Part, bias: list[Part] | None = None, shard: Shard | None = None
    ) -> Linear:
        """Load rows of several tensors, stacked, as one projection; or a shard of it."""
        loaded = load(self, list(parts), bias, shard)
        self.modules.enter(loaded)
        # The allocator cannot always reuse a freed piece's memory for the next one of its size.
        if self._read - self._released >= _RELEASE_BYTES:
            self._released = self._read
            release_freed_memory()
        return loaded

    def stacked(
        self, parts: Sequence[Part], count: int, shard: Shard | None = None
    ) -> torch.Tensor | Stored:
        """Return `[count, rows, K]` in the dtype of projections, or the codes of as many rows, for
        kernels with all experts in one tensor; or a shard of it."""
        first, *others = runs(self, parts, shard)
        if others:
            name = others[0].parts[0].name
            raise CheckpointError(
                f"{name} is stored otherwise than {parts[0].name}: such experts are served on CPUs "
                "only"
            )
        if first.kind is not None and first.floored:
            numbers = [piece.values().to(self.dtype) for piece in first.pieces()]
            return torch.cat(numbers).to(self.device).view(count, -1, numbers[0].shape[1])
        if first.kind is not None:
            columns, depth = shape_of_parts(parts, shard)
            # Kernels with all experts in one piece know no tables.
            pieces = (p.wide() if isinstance(p, IntegerCodes) else p for p in first.pieces())
            return stored(pieces, columns, depth, self.device)
        whole = torch.cat([piece for part in parts for piece in part.pieces(self, shard)])
        return whole.to(self.device).view(count, -1, whole.shape[1])

    @property
    def read(self) -> frozenset[str]:
        """The tensors that were read so far, by their names in the files."""
        return frozenset(self._files[name].source(name) for name in self._used)

    def tell_unread(self) -> None:
        """Log which tensors of the files were not read, under any of their names."""
        read = self.read
        left = (name for name in self._files.keys() - self._used if not _LEFT.fullmatch(name))
        unread = sorted({self._files[name].source(name) for name in left} - read)
        if unread and not self.ranks.rank:
            _log.warning("%d tensors are not read: %s", len(unread), ", ".join(unread[:3]))

    def stacked_site(self, parts: Sequence[Part], count: int, shard: Shard | None = None) -> int:
        """Return the number by which adapters find what `stacked` returns; 0: none do."""
        return self.modules.enter_stacked(parts, count, shard)

    def embedding(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return a lookup table. It stays in its file where dtype and device allow: after one
        check, only needed rows are read. Otherwise a rank gets its part."""
        part = Part(name, tuple(shape), (self.ranks.share(shape[0]),))
        codes = self.codes(part, None)
        if codes is not None:
            return self._expanded(codes, part)
        table = self.mapped(name, shape)
        if table.device == self.device and table.dtype == self.dtype:
            return table if self._keeps_files else table.clone()
        share = self.ranks.share(len(table))
        return table[share.start : share.stop].to(self.device, self.dtype)

    def _expanded(self, codes: Iterator[Codes], part: Part) -> torch.Tensor:
        """Return the numbers that codes stand for."""
        table = torch.empty(shape_of_parts([part], None), dtype=self.dtype, device=self.device)
        first = 0
        for piece in codes:
            values = piece.values()
            table[first : first + len(values)] = values.to(self.device, self.dtype)
            first += len(values)
        return table


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    """Check in one pass over memory that loading reads anyway: the extremes are NaN if anything
    is."""
    if tensor.numel() and not all(math.isfinite(float(bound)) for bound in torch.aminmax(tensor)):
        raise CheckpointError(f"{name} holds values that are NaN or infinite")
