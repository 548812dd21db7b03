"""Memory of a model's weights without reading them: a dry load counts the tensors that it
requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear import Linear, Part, Shard
from vlm_serve.kernels.linear.base import shape
from vlm_serve.kernels.linear.packed import PANEL
from vlm_serve.kernels.linear.torch_dense import TorchDense
from vlm_serve.kernels.ranks import ALONE, Ranks
from vlm_serve.models.adapters.changes import Modules
from vlm_serve.models.decoder import Decoder, load_layer
from vlm_serve.models.files import weight_files
from vlm_serve.models.model import Model
from vlm_serve.models.mtp import Predictor
from vlm_serve.models.quantization.base import Format, OnLoad, loading_format
from vlm_serve.models.quantization.fields import plain_name
from vlm_serve.models.quantization.scheme import QuantScheme
from vlm_serve.models.registry import tensor_names
from vlm_serve.models.spec import ModelSpec
from vlm_serve.models.weights import Weights
from vlm_serve.options.declared import format_size

_META = torch.device("meta")
_MOST_A_BYTE = 8
"""Numbers that a byte of weights can stand for: those of one bit."""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of one rank's weights.

    Attributes:
        projections: with their biases.
        table: the token embeddings.
        others: norms, convolutions, positions of the vision tower.
        mapped: whether the table stays in its file, from which only needed rows are read.
        formats: of projections in a quantised checkpoint, by the names of formats and of the dtype
            of dense ones.
    """

    projections: int
    table: int
    others: int
    mapped: bool
    formats: tuple[tuple[str, int], ...] = ()

    @property
    def in_memory(self) -> int:
        """Bytes allocated for them."""
        return self.projections + self.others + (0 if self.mapped else self.table)

    def __str__(self) -> str:
        table = f", beside a table of {format_size(self.table)} in its file" if self.mapped else ""
        formats = ", ".join(f"{format_size(size)} {name}" for name, size in self.formats)
        return format_size(self.in_memory) + (f" ({formats})" if formats else "") + table


class UnreadWeights(Weights):
    """Tensors without memory, in the shapes that a checkpoint would have; adds up their sizes.

    Args:
        dtype: of dense projections and of the table.
        compute_dtype: of everything else, and of activations.
        device: of the tensors; "meta" for models whose steps are run, since what these allocate
            follows from shapes alone. Quantised projections are then dense, as what is computed
            with them is.
        compiled: whether projections are packed for compiled CPU kernels.
        format_of: the format of a part; None: dense.

    Attributes:
        of_tensors: every requested tensor, by name.
        formats: bytes of quantised projections, by the name of their format.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        compute_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        *,
        compiled: bool = False,
        ranks: Ranks = ALONE,
        format_of: Callable[[Part], Format | OnLoad | None] = lambda part: None,
    ) -> None:
        self.dtype, self.compute_dtype = dtype, compute_dtype or dtype
        self.device, self.ranks, self.compiled = device or torch.device("cpu"), ranks, compiled
        self.text_prefix = "model."
        self.quantised, self.modules = set(), Modules()
        self.of_tensors: dict[str, Sequence[int]] = {}
        self.projections = self.table = self.others = 0
        self.formats: dict[str, int] = {}
        self._format_of = format_of

    def __contains__(self, name: str) -> bool:
        return True

    @property
    def read(self) -> frozenset[str]:
        """No tensor is read."""
        return frozenset()

    def vision_prefix(self, anchor: str) -> str:
        # Adapters name modules as checkpoints do.
        if anchor.startswith(("post_layernorm.", "embeddings.")):
            return "model.vision_tower."
        return "model." if anchor.startswith("vision_tower.") else "model.visual."

    def head_name(self) -> str:
        return "lm_head.weight"

    def shape_of(self, name: str) -> None:
        return None

    def linear(
        self, *parts: Part, bias: list[Part] | None = None, shard: Shard | None = None
    ) -> Linear:
        columns, depth = self._ask(parts, shard, biased=bias is not None)
        biases = None if bias is None else torch.empty(columns, dtype=self.dtype, device=_META)
        weight = torch.empty(columns, depth, dtype=self.dtype, device=_META)
        loaded = TorchDense(weight, biases)
        if self.device == _META:
            loaded.origin, loaded.shard = parts, shard
            self.modules.enter(loaded)
        return loaded

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        rows: Sequence[range] = (),
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        self.of_tensors[name] = shape
        if rows:
            shape = (sum(map(len, rows)), *shape[1:])
        kind = dtype or self.compute_dtype
        self.others += prod(shape) * kind.itemsize
        return self._empty(shape, kind)

    def stacked(
        self, parts: Sequence[Part], count: int, shard: Shard | None = None
    ) -> torch.Tensor:
        columns, depth = self._ask(parts, shard, biased=False)
        return self._empty((count, columns // count, depth), self.dtype)

    def embedding(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        self.of_tensors[name] = shape
        self.table += prod(shape) * self.dtype.itemsize
        return self._empty(shape, self.dtype)

    def unit(self, size: int) -> Linear:
        """Count a dense projection of a vector to one of its size."""
        self._add(None, size, size, biased=False)
        return TorchDense(self._empty((size, size), self.dtype), None)

    def _add(
        self, format_: Format | OnLoad | None, columns: int, depth: int, *, biased: bool
    ) -> None:
        """Count one weight."""
        width, biases = self.dtype.itemsize, columns if biased else 0
        padded = -(-columns // PANEL) * PANEL if self.compiled else columns
        if format_ is not None:
            size = format_.nbytes(padded, depth) + 4 * biases
            self.formats[format_.label] = self.formats.get(format_.label, 0) + size
        elif self.compiled:
            rows = depth + (depth % 2 if self.dtype == torch.bfloat16 else 0)
            size = padded * rows * width + 4 * biases
        else:
            size = (columns * depth + biases) * width
        self.projections += size

    def _ask(self, parts: Sequence[Part], shard: Shard | None, *, biased: bool) -> tuple[int, int]:
        """Count some parts, and return the shape of them all."""
        self.of_tensors.update({part.name: part.shape for part in parts})
        for format_, run in groupby(parts, self._format_of):
            self._add(format_, *shape(list(run), shard), biased=biased)
        return shape(parts, shard)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return one number expanded to a shape, unless steps are run: arithmetic on a "meta"
        tensor imports torch's compiler."""
        if self.device == _META:
            return torch.empty(*shape, dtype=dtype, device=_META)
        return torch.zeros((), dtype=dtype).expand(*shape)


def check_stored(spec: ModelSpec, path: Path) -> None:
    """Compare the sizes of config.json with the files of weights before anything is as large.

    Args:
        path: of the checkpoint; without its files nothing is compared.

    Raises:
        CheckpointError: the files hold too few tensors, or too few bytes for such a model.
    """
    names = tensor_names(path)
    if not names:
        return
    stored = sum(file.stat().st_size for file in weight_files(path))
    layers, described = len(spec.layers), UnreadWeights(torch.uint8)
    if layers <= len(names):
        with suppress(RuntimeError, TypeError, OverflowError):  # Sides that 64 bits do not hold.
            Decoder(spec, described, "model.", None if spec.tied_embeddings else "lm_head.weight")
            if spec.vision is not None:
                spec.vision.load(described, "model.visual.", torch.uint8)
            numbers = described.projections + described.table + described.others
            if numbers <= _MOST_A_BYTE * stored:
                return
    raise CheckpointError(
        f"config.json describes a larger model, of {layers} layers, than the {len(names)} tensors "
        f"in {format_size(stored)} of weights can be: one of its sizes is wrong, or files are "
        "missing"
    )


def unread_model(spec: ModelSpec, dtype: torch.dtype, compute_dtype: torch.dtype) -> Model:
    """Return a model whose forwards compute nothing, on the device "meta"."""
    return Model(spec, UnreadWeights(dtype, compute_dtype, _META), bytes(32))


def weight_bytes(
    spec: ModelSpec,
    *,
    weights: torch.dtype,
    compute: torch.dtype,
    device: torch.device,
    compiled: bool,
    tensor_parallel: int = 1,
    drafts: bool = False,
    quantised: Collection[str] | None = None,
    bits: int | None = None,
    head_rows: int | None = None,
    keeps_files: bool = True,
) -> WeightBytes:
    """Return the sizes, to within one percent of a loaded model's.

    Args:
        spec: the model.
        weights: dtype of projections and table.
        compute: dtype of everything else.
        device: of the tensors.
        compiled: whether they are packed for compiled CPU kernels, in whole panels.
        tensor_parallel: ranks that share the language model; the vision tower is on each. The sizes
            are those of the last rank, which has the larger part of an uneven split.
        drafts: with the multi-token-prediction layer.
        quantised: names of the quantised weights; without them, the config and the habits of
            published checkpoints decide.
        bits: precision to which plain weights are quantised while they are loaded.
        head_rows: rows of the output projection that are loaded; 0: the identity takes its place;
            None: all.
        keeps_files: whether a table may stay in its file; a copy is as whole as it is there.
    """
    ranks = Ranks(tensor_parallel - 1, tensor_parallel)
    whole = device.type == "cpu" and weights == spec.dtype and not _coded_table(spec)
    share = len(ranks.share(spec.vocab_size))
    known = _formats(spec.quantization, quantised, bits, compiled=compiled)
    prefix = "model.language_model." if spec.vision is not None else "model."
    sizes = UnreadWeights(
        *(weights, compute, device), compiled=compiled, ranks=ranks, format_of=known
    )
    head = None if spec.tied_embeddings else sizes.head_name()
    instead = sizes.unit(spec.hidden_size) if head_rows == 0 else None
    rows = tuple(range(head_rows)) if head_rows else None
    Decoder(spec, sizes, prefix, head, instead or rows)
    if drafts:
        Predictor(spec, sizes)
    if spec.vision is not None:
        spec.vision.load(sizes, "model.visual.", compute)
    coded = dict(sizes.formats)
    if coded:
        coded[_name(weights)] = sizes.projections - sum(coded.values())
    return WeightBytes(
        projections=sizes.projections,
        table=sizes.table if whole else sizes.table * share // spec.vocab_size,
        others=sizes.others,
        mapped=whole and keeps_files,
        formats=tuple(coded.items()),
    )


def _formats(
    scheme: QuantScheme | None,
    quantised: Collection[str] | None,
    bits: int | None,
    *,
    compiled: bool,
) -> Callable[[Part], Format | OnLoad | None]:
    """Return a function from parts to their formats."""
    known = None if quantised is None else set(map(plain_name, quantised))

    def format_of(part: Part) -> Format | OnLoad | None:
        if bits is not None:
            return loading_format(bits, part, part.sizes[1])
        if scheme is None:
            return None
        names = [part.name]
        if part.index is not None:
            # Checkpoints may hold each expert separately.
            place, _, kind = part.name.rpartition(".")
            projection = "down" if kind == "down_proj" else "gate"
            names.append(f"{place}.{part.index}.{projection}_proj.weight")
        if known is None:
            formats = map(scheme.expected, names)
        else:
            formats = map(scheme.format_of, (name for name in names if plain_name(name) in known))
        format_ = next(filter(None, formats), None)
        if format_ is None or compiled:
            return format_
        in_one_piece = ".experts" in part.name
        return format_.in_one_piece() if in_one_piece else format_.without_compiler()

    return format_of


def _coded_table(spec: ModelSpec) -> bool:
    """Return True if the table of embeddings is stored as codes, which are expanded."""
    scheme = spec.quantization
    return scheme is not None and scheme.expected("embed_tokens.weight") is not None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def prompt_price(spec: ModelSpec) -> float:
    """Return the draft layer's share of a prompt token's multiplications by weights: the layer
    itself, and the last layer's feed-forward, which otherwise runs for a prompt's last token
    alone."""
    last = UnreadWeights(spec.dtype)
    for part in spec.layers[-1].feed_forwards:
        part.load(last, "", spec.hidden_size)
    drafting, whole = UnreadWeights(spec.dtype), UnreadWeights(spec.dtype)
    Predictor(spec, drafting)
    for index, layer in enumerate(spec.layers):
        load_layer(spec, layer, whole, str(index))
    more = _multiplications(spec, last) + _multiplications(spec, drafting)
    return more / (_multiplications(spec, whole) - _multiplications(spec, last))


def _multiplications(spec: ModelSpec, shapes: UnreadWeights) -> float:
    """Count one token's multiplications by all matrices; it passes `top_k` of its routed
    experts."""
    routing = spec.routing
    share = routing.top_k / routing.num_experts if routing is not None else 1.0
    return sum(
        prod(shape) * (share if ".experts." in name else 1.0)
        for name, shape in shapes.of_tensors.items()
        if len(shape) > 1
    )
