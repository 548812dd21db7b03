"""Codes with scales in our own layout (`native/codes/grouped.h`), multiplied by compiled code."""

from __future__ import annotations

import torch

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.large_pages import zeros
from vlm_serve.kernels.linear.base import WeightRecord
from vlm_serve.kernels.linear.dense import TYPES
from vlm_serve.kernels.linear.packed import PANEL, Packed
from vlm_serve.kernels.native_layout import constant

SCALE_TYPES = TYPES | {
    torch.int8: constant("ROOTS"),
    torch.float8_e4m3fn: constant("FLOAT8"),
    torch.float8_e8m0fnu: constant("E8M0"),
}
_TWO_LEVEL = constant("TWO_LEVEL")

MAX_GROUP = constant("MAX_GROUP")
MIN_GROUP = constant("MIN_GROUP")
"""Groups of k are a multiple of this."""


class PackedCodes(Packed):
    """A packed weight of codes.

    Args:
        words: int32 `[panels, words of a column, 32]`.
        scales: of a type in SCALE_TYPES, `[panels, K / group, 32]`.
        zeros: uint8 like scales, or None.
        factors: float32 `[panels, 1, 32]` beside scales of one byte and level, else None.
        outer, floors: float16 `[panels, K / outer_group, 32]`, as in IntegerCodes; or None.
        kind: compiled code's constant for these codes.
        columns, depth, group: N, K and number of k per scale.
        bias: float32 `[N]` or None.
        dynamic: quantise activations as well.
    """

    def __init__(
        self,
        words: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        factors: torch.Tensor | None = None,
        outer: torch.Tensor | None = None,
        floors: torch.Tensor | None = None,
        *,
        kind: str,
        columns: int,
        depth: int,
        group: int,
        bias: torch.Tensor | None,
        dynamic: bool,
    ) -> None:
        bias = None if bias is None else bias.float().contiguous()
        record = WeightRecord(
            packed=words.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            columns=columns,
            depth=depth,
            type=constant(kind),
            scales=scales.data_ptr(),
            zeros=None if zeros is None else zeros.data_ptr(),
            group=group,
            scale_type=SCALE_TYPES[scales.dtype] if outer is None else _TWO_LEVEL,
            dynamic=dynamic,
            factors=None if factors is None else factors.data_ptr(),
            outer=None if outer is None else outer.data_ptr(),
            floors=None if floors is None else floors.data_ptr(),
            outer_group=0 if outer is None else depth // outer.shape[1],
        )
        super().__init__(record, torch.uint8, words, scales, zeros, factors, outer, floors, bias)
        self.group = group

    def takes(self, dtype: torch.dtype) -> bool:
        return True


def packable(group: int, depth: int) -> bool:
    """Return True if compiled code supports such groups, or parts of them."""
    return _part_of(group, depth) is not None


def packed_group(group: int, depth: int) -> int:
    """Return the number of k per scale in memory.

    This is the file's group, or the largest part of it that compiled code supports; scales are then
    repeated.

    Raises:
        KernelArgumentError: no part is supported.
    """
    size = _part_of(group, depth)
    if size is None:
        problem = f"{group} of {depth}, expected a multiple of {MIN_GROUP} in both"
        raise KernelArgumentError("group", problem)
    return size


def _part_of(group: int, depth: int) -> int | None:
    sizes = range(MAX_GROUP, 0, -MIN_GROUP)
    return next((size for size in sizes if group % size == 0 and depth % size == 0), None)


def panels(columns: int, rows: int, dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
    """Allocate `[panels, rows, 32]` for that many columns."""
    made = zeros(-(-columns // PANEL), rows, PANEL, dtype=dtype)
    return made.fill_(fill) if fill else made


def put(target: torch.Tensor, first: int, values: torch.Tensor) -> None:
    """Fill columns of `[panels, rows, 32]` from `first` on; values are `[columns, rows]`."""
    while len(values):
        panel, column = divmod(first, PANEL)
        whole = len(values) // PANEL
        if column == 0 and whole:
            count = whole * PANEL
            squares = values[:count].view(whole, PANEL, -1)
            target[panel : panel + whole] = squares.transpose(1, 2)
        else:
            count = min(PANEL - column, len(values))
            target[panel, :, column : column + count] = values[:count].T
        first, values = first + count, values[count:]
