"""compressed-tensors' integers: rows of `weight_packed` are rows of the weight.

`weight_packed` int32 `[N, ceil(K * bits / 32)]`, or plain int8 `weight` `[N, K]`; `weight_scale`
`[N, K / group]`, `[N, 1]` or `[1]`; `weight_zero_point` for asymmetric ones, packed along the rows
beside packed weights; `weight_shape`. Codes are stored in the upper half of the unsigned range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear import Part
from vlm_serve.models.quantization.base import (
    Format,
    Names,
    OpenedIntegers,
    Tensors,
    check_order,
    group_of,
    halves,
    integer_bytes,
    integers,
    scales,
    words,
)
from vlm_serve.models.quantization.gptq import integer_label, whole_weight


@dataclass(frozen=True, slots=True)
class Packed(Format):
    """The format. `group` is -1 for whole rows; `plain`: codes are int8 and not packed."""

    bits: int
    group: int
    symmetric: bool
    plain: bool = False

    @property
    def label(self) -> str:
        return integer_label(self.bits, self.group)

    def mark(self, names: Names) -> str:
        return names.weight if self.plain else names.of_weight("packed")

    def holds(self, tensors: Tensors, names: Names) -> bool:
        mark = self.mark(names)
        return mark in tensors and not (self.plain and tensors.stored(mark).is_floating_point())

    def open(self, tensors: Tensors, part: Part) -> OpenedPacked:
        names, (rows, depth) = whole_weight(part), part.sizes
        mark, each = self.mark(names), 32 // self.bits
        group = group_of(self.group, part, mark)
        if self.plain:
            packed = integers(tensors, mark, (rows, depth), torch.int8)
        else:
            packed = integers(tensors, mark, (rows, -(-depth // each)), torch.int32)
            self._check_shape(tensors, names, (rows, depth))
        name = names.of_weight("scale")
        whole: tuple[tuple[int, ...], ...] = ((rows,), (1,), ()) if group == depth else ()
        factors = scales(tensors, name, (rows, depth // group), *whole)
        factors = factors.reshape(-1, depth // group).expand(rows, -1)
        check_order(tensors, names.of_weight("g_idx"), depth, group, "actorder")
        zeros = self._zeros(tensors, names, rows, depth // group)
        return OpenedPacked(packed, factors, zeros, self.bits, group)

    def nbytes(self, columns: int, depth: int) -> int:
        return integer_bytes(columns, depth, self.bits, self.group, zeros=not self.symmetric)

    def _check_shape(self, tensors: Tensors, names: Names, shape: tuple[int, int]) -> None:
        name = names.of_weight("shape")
        found = integers(tensors, name, (2,)).tolist()
        if tuple(found) != shape:
            raise CheckpointError(f"{name} says {found}, the config implies {list(shape)}")

    def _zeros(self, tensors: Tensors, names: Names, rows: int, groups: int) -> torch.Tensor | None:
        if self.symmetric:
            return None
        name = names.of_weight("zero_point")
        if self.plain:
            stored = integers(tensors, name, (rows, groups), torch.int8)
            return stored.view(torch.uint8) ^ 128
        shape = (-(-rows * self.bits // 32), groups)
        stored = integers(tensors, name, shape, torch.int32)
        return halves(words(stored.T), self.bits)[:, :rows].T


class OpenedPacked(OpenedIntegers):
    """Words or bytes of consecutive k, row after row."""

    def __init__(
        self,
        packed: torch.Tensor,
        factors: torch.Tensor,
        zeros: torch.Tensor | None,
        bits: int,
        group: int,
    ) -> None:
        super().__init__(factors, zeros, bits, group)
        self._packed = packed
        self._each = packed.itemsize * 8 // bits

    def unpacked(self, rows: range, columns: range) -> torch.Tensor:
        first, last = columns.start // self._each, -(-columns.stop // self._each)
        own = self._packed[rows.start : rows.stop, first:last]
        if own.dtype == torch.int8:
            return own.contiguous().view(torch.uint8) ^ 128
        start = columns.start - first * self._each
        return halves(words(own), self._bits)[:, start : start + len(columns)]
