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
from vlm_serve.kernels.linear.codes import Codes, IntegerCodes
from vlm_serve.models.shape_fields import mismatch

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

    def beside(self, name: str) -> str:
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


class OpenedIntegers(Opened):
    """Codes with scales, and perhaps zero points, per row and group of k.

    Args:
        scales: `[N, K / group]`.
        zeros: uint8 `[N, K / group]` or None.
        bits, group: as in IntegerCodes.
    """

    def __init__(
        self, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, group: int
    ) -> None:
        if zeros is not None and bool((zeros == 1 << (bits - 1)).all()):
            zeros = None
        self._scales, self._zeros, self._bits, self._group = scales, zeros, bits, group

    @abstractmethod
    def unpacked(self, rows: range, columns: range) -> torch.Tensor:
        """Return uint8 `[n, k]` codes."""

    def piece(self, rows: range, columns: range, unit: int) -> IntegerCodes:
        group = math.gcd(self._group, columns.start, len(columns))
        chosen = torch.arange(columns.start, columns.stop, group) // self._group
        part = slice(rows.start, rows.stop)
        zeros = None if self._zeros is None else self._zeros[part][:, chosen]
        codes, scales = self.unpacked(rows, columns), self._scales[part][:, chosen]
        return IntegerCodes(codes, scales, zeros, self._bits, group)


def integer_bytes(columns: int, depth: int, bits: int, group: int, *, zeros: bool) -> int:
    """Return the bytes of integer codes with two-byte scales; a group of -1 is a whole row."""
    groups = 1 if group == -1 else -(-depth // group)
    return columns * (-(-depth * bits // 8) + groups * (3 if zeros else 2))


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


def check_order(tensors: Tensors, name: str, depth: int, group: int, option: str) -> None:
    """Check that the group of each column, where a checkpoint stores it, is the plain one.

    Raises:
        CheckpointError: columns are ordered by activation, by the quantiser's `option`.
    """
    if name not in tensors:
        return
    if not torch.equal(shaped(tensors, name, (depth,)).long(), torch.arange(depth) // group):
        raise CheckpointError(
            f"{name} orders columns by activation ({option}), which is not supported"
        )


def integers(
    tensors: Tensors, name: str, shape: tuple[int, ...], *what: torch.dtype
) -> torch.Tensor:
    """Return a tensor of codes with that shape and one of those dtypes (any integers without)."""
    tensor = shaped(tensors, name, shape)
    if tensor.dtype not in (what or _INTEGERS):
        wanted = " or ".join(str(each).removeprefix("torch.") for each in what) or "integers"
        found = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{name} is {found}, its format has {wanted}")
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
    low, high = (float(each) for each in torch.aminmax(tensor))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise CheckpointError(f"{name} holds scales that are NaN or infinite")
    if low < 0:
        raise CheckpointError(f"{name} holds negative scales")
    return tensor


def shaped(tensors: Tensors, name: str, *shapes: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with one of those shapes."""
    found = tensors.shape_of(name)
    if found is None:
        raise CheckpointError(f"the checkpoint has no {name}")
    if found not in shapes:
        raise CheckpointError(mismatch(name, found, *shapes))
    return tensors.stored(name)


def halves(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return uint8 `[..., n * 8 / bits]` codes of a dense tensor of bytes `[..., n]`, low bits
    first."""
    if bits == 8:
        return packed
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def words(packed: torch.Tensor) -> torch.Tensor:
    """Return the bytes of int32 words, `[..., 4 n]`, low ones first."""
    return packed.contiguous().view(torch.uint8)
