"""GPTQ: columns of `qweight` are rows of the weight, with consecutive codes packed into its words.

`qweight` int32 `[K * bits / 32, N]`, `qzeros` int32 `[K / group, N * bits / 32]`, `scales` `[K /
group, N]`, and `g_idx` int32 `[K]`, the group of each k. The first version stores zero points minus
one.
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


@dataclass(frozen=True, slots=True)
class Gptq(Format):
    """The format. `group` is -1 for whole rows; `offset`: added to stored zero points; `symmetric`:
    whether all of them are expected to be in the middle; `ordered`: whether `g_idx` must be there,
    because the quantiser chose an order of columns."""

    bits: int
    group: int
    offset: int
    symmetric: bool
    ordered: bool = False

    @property
    def label(self) -> str:
        return integer_label(self.bits, self.group)

    def mark(self, names: Names) -> str:
        return names.beside("qweight")

    def open(self, tensors: Tensors, part: Part) -> OpenedGptq:
        names, (rows, depth) = whole_weight(part), part.sizes
        mark, each = self.mark(names), 32 // self.bits
        group = group_of(self.group, part, mark)
        groups = depth // group
        check_words(mark, rows=rows, depth=depth, each=each)
        packed = integers(tensors, mark, (depth // each, rows), torch.int32)
        factors = scales(tensors, names.beside("scales"), (groups, rows))
        stored = integers(tensors, names.beside("qzeros"), (groups, rows // each), torch.int32)
        zeros = halves(words(stored), self.bits) + self.offset
        zeros &= (1 << self.bits) - 1
        if self.symmetric and bool((zeros != 1 << (self.bits - 1)).any()):
            raise CheckpointError(
                f"{names.beside('qzeros')} are not those of symmetric weights; sym or "
                "checkpoint_format in quantization_config is wrong"
            )
        if self.ordered and groups > 1 and names.beside("g_idx") not in tensors:
            raise CheckpointError(
                f"the checkpoint has no {names.beside('g_idx')}, which desc_act asks for"
            )
        check_order(tensors, names.beside("g_idx"), depth, group, "desc_act")
        return OpenedGptq(packed, factors.T, zeros.T, self.bits, group)

    def nbytes(self, columns: int, depth: int) -> int:
        return integer_bytes(columns, depth, self.bits, self.group, zeros=not self.symmetric)


class OpenedGptq(OpenedIntegers):
    """Words of consecutive k."""

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
        first = columns.start // self._each
        last = -(-columns.stop // self._each)
        own = self._packed[first:last, rows.start : rows.stop].T
        codes = halves(words(own), self._bits)
        start = columns.start - first * self._each
        return codes[:, start : start + len(columns)]


def integer_label(bits: int, group: int) -> str:
    """Return the name in tables of integers with a scale per group."""
    return f"int{bits} " + ("with a scale per channel" if group == -1 else f"in groups of {group}")


def whole_weight(part: Part) -> Names:
    """Return the names of a part's weight.

    Raises:
        CheckpointError: it is one of several in one tensor, which the format does not support.
    """
    if part.index is not None or part.transposed:
        raise CheckpointError(f"{part.name} holds several experts, which must lie apart")
    return Names(part.name)


def check_words(name: str, *, rows: int, depth: int, each: int) -> None:
    """Raise CheckpointError unless rows and columns fill whole words."""
    if rows % each or depth % each:
        raise CheckpointError(f"{name}: {rows} rows of {depth} do not fill words of {each} codes")
