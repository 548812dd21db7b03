"""Integers of four or eight bits, packed into words of 32: GPTQ, AWQ and compressed-tensors'.

GPTQ: columns of `qweight` are rows of the weight, with consecutive codes packed into its words.
`qweight` int32 `[K * bits / 32, N]`, `qzeros` int32 `[K / group, N * bits / 32]`, `scales` `[K /
group, N]`, and `g_idx` int32 `[K]`, the group of each k. The first version stores zero points minus
one.

AWQ: as GPTQ, but the words of `qweight` and `qzeros` both run along the weight's rows, in a
different order, and zero points are stored without offset. `qweight` int32 `[K, N * bits / 32]`.

compressed-tensors: rows of `weight_packed` are rows of the weight. `weight_packed` int32 `[N,
ceil(K * bits / 32)]`, or plain int8 `weight` `[N, K]`; `weight_scale` `[N, K / group]`, `[N, 1]` or
`[1]`; `weight_zero_point` for asymmetric ones, packed along the rows beside packed weights;
`weight_shape`. Codes are stored in the upper half of the unsigned range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear import Part
from vlm_serve.kernels.linear.codes import IntegerCodes
from vlm_serve.models.quantization.base import (
    Format,
    Names,
    Opened,
    Tensors,
    group_of,
    integers,
    scales,
    shaped,
    whole_weight,
)
from vlm_serve.models.quantization.fields import PLAIN

_PLACES = {4: [0, 4, 1, 5, 2, 6, 3, 7], 8: [0, 2, 1, 3]}
"""The place in a word of AWQ of each of its codes, by bits."""


class OpenedIntegers(Opened):
    """Codes with scales, and perhaps zero points, per row and group of k.

    Args:
        unpacked: returns uint8 `[n, k]`, the codes of some rows and columns.
        scales: `[N, K / group]`.
        zeros: uint8 `[N, K / group]` or None.
        bits, group: as in IntegerCodes.
        factor: of all scales of e2m1 numbers; None: codes are integers.
    """

    def __init__(
        self,
        unpacked: Callable[[range, range], torch.Tensor],
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bits: int,
        group: int,
        factor: float | None = None,
    ) -> None:
        if zeros is not None and bool((zeros == 1 << (bits - 1)).all()):
            zeros = None
        self._unpacked, self._factor = unpacked, factor
        self._scales, self._zeros, self._bits, self._group = scales, zeros, bits, group

    def piece(self, rows: range, columns: range, unit: int) -> IntegerCodes:
        group = math.gcd(self._group, columns.start, len(columns))
        chosen = torch.arange(columns.start, columns.stop, group) // self._group
        part = slice(rows.start, rows.stop)
        zeros = None if self._zeros is None else self._zeros[part][:, chosen]
        codes, scales = self._unpacked(rows, columns), self._scales[part][:, chosen]
        factors = None if self._factor is None else torch.full((len(rows),), self._factor)
        return IntegerCodes(
            codes, scales, zeros, self._bits, group, factors, float4=factors is not None
        )


@dataclass(frozen=True, slots=True)
class Integers(Format):
    """The common base. `group` is -1 for whole rows."""

    bits: int
    group: int

    @property
    def label(self) -> str:
        groups = "with a scale per channel" if self.group == -1 else f"in groups of {self.group}"
        return f"int{self.bits} {groups}"

    def _nbytes(self, columns: int, depth: int, *, zeros: bool) -> int:
        """Return the bytes in memory, with two-byte scales."""
        groups = 1 if self.group == -1 else -(-depth // self.group)
        return columns * (-(-depth * self.bits // 8) + groups * (3 if zeros else 2))

    def _of_words(
        self, tensors: Tensors, part: Part, *, along_rows: bool
    ) -> tuple[Names, int, torch.Tensor, torch.Tensor]:
        """Return the names, the group, `qweight` and the scales `[N, K / group]` of a weight whose
        columns lie in words, or whose rows do."""
        names, (rows, depth) = whole_weight(part), part.sizes
        mark, per_word = names.sibling("qweight"), 32 // self.bits
        group = group_of(self.group, part, mark)
        if rows % per_word or (depth % per_word and not along_rows):
            depth = per_word if along_rows else depth
            raise CheckpointError(
                f"{mark}: {rows} rows of {depth} do not fill words of {per_word} codes"
            )
        shape = (depth, rows // per_word) if along_rows else (depth // per_word, rows)
        packed = integers(tensors, mark, shape, torch.int32)
        return (
            names,
            group,
            packed,
            scales(tensors, names.sibling("scales"), (depth // group, rows)).T,
        )


@dataclass(frozen=True, slots=True)
class Gptq(Integers):
    """GPTQ. `offset`: added to stored zero points; `symmetric`: whether all of them are expected to
    be in the middle; `ordered`: whether `g_idx` must be there, because the quantiser chose an order
    of columns."""

    offset: int
    symmetric: bool
    ordered: bool = False

    def mark(self, names: Names) -> str:
        return names.sibling("qweight")

    def open(self, tensors: Tensors, part: Part) -> OpenedIntegers:
        names, group, packed, factors = self._of_words(tensors, part, along_rows=False)
        rows, groups = factors.shape
        name = names.sibling("qzeros")
        stored = integers(tensors, name, (groups, rows * self.bits // 32), torch.int32)
        zeros = _halves(_words(stored), self.bits) + self.offset
        zeros &= (1 << self.bits) - 1
        if self.symmetric and bool((zeros != 1 << (self.bits - 1)).any()):
            raise CheckpointError(
                f"{name} are not those of symmetric weights; sym or checkpoint_format in "
                "quantization_config is wrong"
            )
        order = names.sibling("g_idx")
        if self.ordered and groups > 1 and order not in tensors:
            raise CheckpointError(f"the checkpoint has no {order}, which desc_act asks for")
        _check_order(tensors, order, part.sizes[1], group, "desc_act")
        unpacked = partial(codes_of_rows, packed.T, self.bits)
        return OpenedIntegers(unpacked, factors, zeros.T, self.bits, group)

    def nbytes(self, columns: int, depth: int) -> int:
        return self._nbytes(columns, depth, zeros=not self.symmetric)


@dataclass(frozen=True, slots=True)
class Awq(Integers):
    """AWQ."""

    def mark(self, names: Names) -> str:
        return names.sibling("qweight")

    def open(self, tensors: Tensors, part: Part) -> OpenedIntegers:
        names, group, packed, factors = self._of_words(tensors, part, along_rows=True)
        name, (rows, groups) = names.sibling("qzeros"), factors.shape
        if name not in tensors:
            raise CheckpointError(
                f"the checkpoint has no {name}: AWQ without zero points is not supported; export "
                "it with them, or as compressed-tensors"
            )
        stored = integers(tensors, name, (groups, rows * self.bits // 32), torch.int32)
        zeros = _ordered(stored, self.bits).T
        return OpenedIntegers(partial(self._codes, packed), factors, zeros, self.bits, group)

    def _codes(self, packed: torch.Tensor, rows: range, columns: range) -> torch.Tensor:
        outer, inner = _window(rows, 32 // self.bits)
        codes = _ordered(packed[columns.start : columns.stop, outer], self.bits)
        return codes[:, inner].T.contiguous()

    def nbytes(self, columns: int, depth: int) -> int:
        return self._nbytes(columns, depth, zeros=True)


@dataclass(frozen=True, slots=True)
class Packed(Integers):
    """compressed-tensors' integers. `plain`: codes are int8 and not packed."""

    symmetric: bool
    plain: bool = False

    def mark(self, names: Names) -> str:
        return names.weight if self.plain else names.of_weight("packed")

    def holds(self, tensors: Tensors, names: Names) -> bool:
        mark = self.mark(names)
        return mark in tensors and not (self.plain and tensors.stored(mark).is_floating_point())

    def open(self, tensors: Tensors, part: Part) -> OpenedIntegers:
        names, (rows, depth) = whole_weight(part), part.sizes
        mark = self.mark(names)
        group = group_of(self.group, part, mark)
        if self.plain:
            packed = integers(tensors, mark, (rows, depth), torch.int8)
        else:
            packed = integers(tensors, mark, (rows, -(-depth * self.bits // 32)), torch.int32)
            self._check_shape(tensors, names, (rows, depth))
        name = names.of_weight("scale")
        whole: tuple[tuple[int, ...], ...] = ((rows,), (1,), ()) if group == depth else ()
        factors = scales(tensors, name, (rows, depth // group), *whole)
        factors = factors.reshape(-1, depth // group).expand(rows, -1)
        _check_order(tensors, names.of_weight("g_idx"), depth, group, "actorder")
        zeros = self._zeros(tensors, names, rows, depth // group)
        unpacked = partial(codes_of_rows, packed, self.bits)
        return OpenedIntegers(unpacked, factors, zeros, self.bits, group)

    def nbytes(self, columns: int, depth: int) -> int:
        return self._nbytes(columns, depth, zeros=not self.symmetric)

    def _check_shape(self, tensors: Tensors, names: Names, shape: tuple[int, int]) -> None:
        name = names.of_weight("shape")
        stored = integers(tensors, name, (2,)).tolist()
        if tuple(stored) != shape:
            raise CheckpointError(f"{name} says {stored}, the config implies {list(shape)}")

    def _zeros(self, tensors: Tensors, names: Names, rows: int, groups: int) -> torch.Tensor | None:
        if self.symmetric:
            return None
        name = names.of_weight("zero_point")
        if self.plain:
            stored = integers(tensors, name, (rows, groups), torch.int8)
            return stored.view(torch.uint8) ^ 128
        shape = (-(-rows * self.bits // 32), groups)
        stored = integers(tensors, name, shape, torch.int32)
        return _halves(_words(stored.T), self.bits)[:, :rows].T


def _check_order(tensors: Tensors, name: str, depth: int, group: int, option: str) -> None:
    """Check that the group of each column, where a checkpoint stores it, is the plain one.

    Raises:
        CheckpointError: columns are ordered by activation, by the quantiser's `option`.
    """
    if name not in tensors:
        return
    if not torch.equal(shaped(tensors, name, (depth,)).long(), torch.arange(depth) // group):
        raise CheckpointError(
            f"{name} orders columns by activation ({option}), which is not supported: {PLAIN}"
        )


def codes_of_rows(packed: torch.Tensor, bits: int, rows: range, columns: range) -> torch.Tensor:
    """Return codes of words or bytes of consecutive k, `[N, words]`."""
    outer, inner = _window(columns, packed.itemsize * 8 // bits)
    words = packed[rows.start : rows.stop, outer]
    if words.dtype == torch.int8:
        return words.contiguous().view(torch.uint8) ^ 128
    return _halves(_words(words), bits)[:, inner]


def _window(span: range, per_word: int) -> tuple[slice, slice]:
    """Return the words with a run of codes, and its place in their codes."""
    first = span.start // per_word
    start = span.start - first * per_word
    return slice(first, -(-span.stop // per_word)), slice(start, start + len(span))


def _ordered(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the uint8 `[k, n * 32 / bits]` codes of `[k, n]` words of AWQ."""
    codes = _halves(_words(packed), bits).view(*packed.shape, 32 // bits)
    return codes[..., _PLACES[bits]].flatten(-2)


def _halves(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return uint8 `[..., n * 8 / bits]` codes of a dense tensor of bytes `[..., n]`, low bits
    first."""
    if bits == 8:
        return packed
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _words(packed: torch.Tensor) -> torch.Tensor:
    """Return the bytes of int32 words, `[..., 4 n]`, low ones first."""
    return packed.contiguous().view(torch.uint8)
