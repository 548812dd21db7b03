"""Interfaces and helpers of the formats of quantised weights in checkpoints."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear import Part, Shard
from vlm_serve.kernels.linear.base import CHUNK_BYTES
from vlm_serve.kernels.linear.codes import Codes
from vlm_serve.kernels.linear.quantising import group_of as quantised_group
from vlm_serve.kernels.linear.quantising import num_bytes
from vlm_serve.models.config import mismatch

PIECE_BYTES = CHUNK_BYTES // 4
"""Codes unpacked at a time: with temporaries they stay below CHUNK_BYTES."""
GROUPS = (16, 32, 64, 128, 256, 512, 1024)
"""Supported numbers of values per scale, besides whole rows."""
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Tensors(Protocol):
    """The tensors of a checkpoint. Raises CheckpointError."""

    def __contains__(self, name: str) -> bool: ...

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape; None if there is no such tensor."""
        ...

    def stored(self, name: str) -> torch.Tensor:
        """Return a tensor as stored in its file, of any shape and dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the tensors that represent a weight.

    Attributes:
        weight: the name that the weight would have if it were dense.
    """

    weight: str

    @property
    def module(self) -> str:
        """The name in lists of modules."""
        return self.weight.removesuffix(".weight")

    def sibling(self, name: str) -> str:
        """Return the name of another tensor in the same module; experts in one tensor have none."""
        inside = self.weight.endswith(".weight")
        return f"{self.module}{'.' if inside else '_'}{name}"

    def of_weight(self, name: str) -> str:
        """Return the name of a tensor whose suffix names a property of the weight."""
        return f"{self.weight}_{name}"


class Opened(ABC):
    """The validated tensors of one `[N, K]` weight."""

    @abstractmethod
    def piece(self, rows: range, columns: range, unit: int) -> Codes:
        """Return a part of it. Raises CheckpointError for codes that are no numbers.

        Args:
            rows: from a multiple of `unit` on.
            columns: a cut through values with one scale makes their group as small as needed,
                exactly.
            unit: a divisor of the whole's; rows that may share a scale.
        """

    @property
    def piece_bytes(self) -> int:
        """Codes to unpack at a time."""
        return PIECE_BYTES

    @property
    def unit(self) -> int:
        """Rows that share a scale."""
        return 1


class Format(ABC):
    """The storage of one kind of weights; frozen, so that layers can share one."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Name in tables: the same for weights of equal memory."""

    @abstractmethod
    def mark(self, names: Names) -> str:
        """Return the name of the tensor whose presence indicates this format."""

    def holds(self, tensors: Tensors, names: Names) -> bool:
        """Return True if a checkpoint stores a weight in this format."""
        return self.mark(names) in tensors

    @abstractmethod
    def open(self, tensors: Tensors, part: Part) -> Opened:
        """Return the weight of a part.

        Raises:
            CheckpointError: a tensor is missing, has another shape or dtype, or bad scales; names
                it.
        """

    @abstractmethod
    def nbytes(self, columns: int, depth: int) -> int:
        """Return the bytes of `[N, K]` in memory."""

    def without_compiler(self) -> Format | None:
        """Return the format in which torch and Triton multiply; None: as plain numbers."""
        return self

    def in_one_piece(self) -> Format | None:
        """Return the format of experts that lie in one piece, as Triton multiplies by them."""
        return self.without_compiler()


@dataclass(frozen=True, slots=True)
class OnLoad:
    """Codes made at load time: bits, and the number of k per scale."""

    bits: int
    group: int

    @property
    def label(self) -> str:
        """Name in tables."""
        return f"int{self.bits}"

    def nbytes(self, columns: int, depth: int) -> int:
        """Return the bytes of `[N, K]` in memory; K may be a shard of a row's."""
        return num_bytes(columns, depth, self.bits, math.gcd(self.group, depth))


def loading_format(bits: int, part: Part, depth: int) -> OnLoad | None:
    """Return a part's format with `--quantization`; None: it stays as it is.

    Args:
        bits: requested bits, 4, 6 or 8.
        part: with its minimum of bits.
        depth: of the rows that are loaded.
    """
    bits = max(bits, part.least_bits)
    group = quantised_group(bits, depth) if bits <= 8 else None
    return None if group is None else OnLoad(bits, group)


def pieces(opened: Opened, part: Part, shard: Shard | None) -> Iterator[Codes]:
    """Yield the codes of a part's rows, at most `piece_bytes` at a time."""
    columns = range(part.sizes[1])
    if shard is not None and shard.axis == 1:
        columns = shard.of(len(columns))
    ranges = part.ranges(shard)
    unit = math.gcd(opened.unit, *(rows.start for rows in ranges))
    step = max(1, opened.piece_bytes // (len(columns) * unit)) * unit
    for rows in ranges:
        for start in range(rows.start, rows.stop, step):
            yield opened.piece(range(start, min(start + step, rows.stop)), columns, unit)


def whole_weight(part: Part) -> Names:
    """Return the names of a part's weight.

    Raises:
        CheckpointError: it is one of several in one tensor, which the format does not support.
    """
    if part.index is not None or part.transposed:
        raise CheckpointError(f"{part.name} holds several experts, which must lie apart")
    return Names(part.name)


def group_of(group: int, part: Part, tensor: str) -> int:
    """Return the number of values per scale in a row of a part; -1 means the whole row.

    Raises:
        CheckpointError: rows are not made of whole groups.
    """
    depth = part.sizes[1]
    if group == -1:
        return depth
    if depth % group:
        raise CheckpointError(f"groups of {group} do not fit the {depth} columns of {tensor}")
    return group


def integers(
    tensors: Tensors, name: str, shape: tuple[int, ...], *dtypes: torch.dtype
) -> torch.Tensor:
    """Return a tensor of codes with that shape and one of those dtypes (any integers without)."""
    tensor = shaped(tensors, name, shape)
    if tensor.dtype not in (dtypes or _INTEGERS):
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes) or "integers"
        actual = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{name} is {actual}, its format has {wanted}")
    return tensor


def scales(tensors: Tensors, name: str, *shapes: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of scales with one of those shapes, float32, bfloat16 or float16.

    Raises:
        CheckpointError: it is missing or does not fit, or a scale is NaN, infinite or negative.
    """
    tensor = shaped(tensors, name, *shapes)
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not a type of scales"
        )
    low, high = (float(bound) for bound in torch.aminmax(tensor))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise CheckpointError(f"{name} holds scales that are NaN or infinite")
    if low < 0:
        raise CheckpointError(f"{name} holds negative scales")
    return tensor


def exponents(tensors: Tensors, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the bytes of scales that are exponents of two.

    Raises:
        CheckpointError: they are missing or do not fit, or one is NaN.
    """
    stored = integers(tensors, name, shape, torch.uint8, torch.float8_e8m0fnu).view(torch.uint8)
    if bool((stored == 0xFF).any()):
        raise CheckpointError(f"{name} holds scales that are NaN or infinite")
    return stored


def shaped(tensors: Tensors, name: str, *shapes: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with one of those shapes."""
    actual = tensors.shape_of(name)
    if actual is None:
        raise CheckpointError(f"the checkpoint has no {name}")
    if actual not in shapes:
        raise CheckpointError(mismatch(name, actual, *shapes))
    return tensors.stored(name)
