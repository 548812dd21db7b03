"""AWQ: as GPTQ, but the words of `qweight` and `qzeros` both run along the weight's rows, in a
different order, and zero points are stored without offset.

`qweight` int32 `[K, N * bits / 32]`, `qzeros` int32 `[K / group, N * bits / 32]`, `scales` `[K /
group, N]`.
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
    group_of,
    halves,
    integer_bytes,
    integers,
    scales,
    words,
)
from vlm_serve.models.quantization.gptq import check_words, integer_label, whole_weight

_PLACES = {4: [0, 4, 1, 5, 2, 6, 3, 7], 8: [0, 2, 1, 3]}
"""The place in a word of each of its codes, by bits."""


@dataclass(frozen=True, slots=True)
class Awq(Format):
    """The format. `group` is -1 for whole rows."""

    bits: int
    group: int

    @property
    def label(self) -> str:
        return integer_label(self.bits, self.group)

    def mark(self, names: Names) -> str:
        return names.beside("qweight")

    def open(self, tensors: Tensors, part: Part) -> OpenedAwq:
        names, (rows, depth) = whole_weight(part), part.sizes
        mark, each = self.mark(names), 32 // self.bits
        group = group_of(self.group, part, mark)
        check_words(mark, rows=rows, depth=each, each=each)
        packed = integers(tensors, mark, (depth, rows // each), torch.int32)
        shape = (depth // group, rows)
        factors = scales(tensors, names.beside("scales"), shape)
        name = names.beside("qzeros")
        if name not in tensors:
            raise CheckpointError(
                f"the checkpoint has no {name}: AWQ without zero points is not supported; export "
                "it with them, or as compressed-tensors"
            )
        stored = integers(tensors, name, (shape[0], rows // each), torch.int32)
        return OpenedAwq(packed, factors.T, _ordered(stored, self.bits).T, self.bits, group)

    def nbytes(self, columns: int, depth: int) -> int:
        return integer_bytes(columns, depth, self.bits, self.group, zeros=True)


class OpenedAwq(OpenedIntegers):
    """Words of several rows."""

    def __init__(
        self,
        packed: torch.Tensor,
        factors: torch.Tensor,
        zeros: torch.Tensor,
        bits: int,
        group: int,
    ) -> None:
        super().__init__(factors, zeros, bits, group)
        self._packed, self._each = packed, 32 // bits

    def unpacked(self, rows: range, columns: range) -> torch.Tensor:
        first, last = rows.start // self._each, -(-rows.stop // self._each)
        words_ = self._packed[columns.start : columns.stop, first:last]
        codes = _ordered(words_, self._bits)
        start = rows.start - first * self._each
        return codes[:, start : start + len(rows)].T.contiguous()


def _ordered(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the uint8 `[k, n * 32 / bits]` codes of `[k, n]` words."""
    codes = halves(words(packed), bits).view(*packed.shape, 32 // bits)
    return codes[..., _PLACES[bits]].flatten(-2)
