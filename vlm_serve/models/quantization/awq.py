"""AWQ: as GPTQ, but the words of `qweight` and `qzeros` both run along the weight's rows, in a
different order, and zero points are stored without offset.

`qweight` int32 `[K, N / 8]`, `qzeros` int32 `[K / group, N / 8]`, `scales` `[K / group, N]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlm_serve.kernels.linear import Part
from vlm_serve.models.quantization.base import (
    Format,
    Names,
    OpenedIntegers,
    Tensors,
    group_of,
    halves,
    integer_bytes,
    integers,
    scales,
    words,
)
from vlm_serve.models.quantization.gptq import check_words, integer_label, whole_weight

_BITS = 4
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""The nibble of a word for each of its eight codes."""


@dataclass(frozen=True, slots=True)
class Awq(Format):
    """The format. `group` is -1 for whole rows."""

    group: int

    @property
    def label(self) -> str:
        return integer_label(_BITS, self.group)

    def mark(self, names: Names) -> str:
        return names.beside("qweight")

    def open(self, tensors: Tensors, part: Part) -> OpenedAwq:
        names, (rows, depth) = whole_weight(part), part.sizes
        mark = self.mark(names)
        group = group_of(self.group, part, mark)
        check_words(mark, rows=rows, depth=8, each=8)
        packed = integers(tensors, mark, (depth, rows // 8), torch.int32)
        shape = (depth // group, rows)
        factors = scales(tensors, names.beside("scales"), shape)
        zeros = integers(tensors, names.beside("qzeros"), (shape[0], rows // 8), torch.int32)
        return OpenedAwq(packed, factors.T, _ordered(zeros).T, group)

    def nbytes(self, columns: int, depth: int) -> int:
        return integer_bytes(columns, depth, _BITS, self.group, zeros=True)


class OpenedAwq(OpenedIntegers):
    """Words of eight rows."""

    def __init__(
        self, packed: torch.Tensor, factors: torch.Tensor, zeros: torch.Tensor, group: int
    ) -> None:
        super().__init__(factors, zeros, _BITS, group)
        self._packed = packed

    def unpacked(self, rows: range, columns: range) -> torch.Tensor:
        first, last = rows.start // 8, -(-rows.stop // 8)
        codes = _ordered(self._packed[columns.start : columns.stop, first:last])
        start = rows.start - first * 8
        return codes[:, start : start + len(rows)].T.contiguous()


def _ordered(packed: torch.Tensor) -> torch.Tensor:
    """Return the uint8 `[k, 8 n]` codes of `[k, n]` words."""
    codes = halves(words(packed), _BITS).view(*packed.shape, 8)
    return codes[..., _PLACES].flatten(-2)
