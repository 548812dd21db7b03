"""Codes with scales, packed for compiled CPU code; `native/codes/grouped.h` describes their layout
and arithmetic.

e4m3 codes have scales per block or output channel. int8, int6, int4 and e2m1 codes have scales in
groups of k, and may have zero points.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.large_pages import zeros
from vlm_serve.kernels.linear.base import WeightRecord
from vlm_serve.kernels.linear.codes import Float8Codes, IntegerCodes
from vlm_serve.kernels.linear.dense import TYPES
from vlm_serve.kernels.linear.packed import PANEL, PackedLinear
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
_KINDS = {(8, False): "INT8", (6, False): "INT6", (4, False): "INT4", (4, True): "FLOAT4"}


class PackedCodes(PackedLinear):
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
    values = zeros(-(-columns // PANEL), rows, PANEL, dtype=dtype)
    return values.fill_(fill) if fill else values


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


class PackedFloat8(PackedCodes):
    """A weight of e4m3 codes, packed for compiled CPU code."""

    @classmethod
    def of(
        cls,
        pieces: Iterable[Float8Codes],
        columns: int,
        depth: int,
        bias: torch.Tensor | None = None,
    ) -> PackedFloat8:
        """Pack `[n, K]` pieces, stacked by rows, all with the same block sizes and scale type.

        A piece begins with a block.

        Raises:
            KernelArgumentError: pieces that differ, or unsupported blocks.
        """
        pieces = iter(pieces)
        piece: Float8Codes | None = next(pieces)
        assert piece is not None
        like, group = piece, packed_group(min(piece.block[1], depth), depth)
        words = panels(columns, depth // 4, torch.int32)
        scales = panels(columns, depth // group, like.scales.dtype)
        first = 0
        while piece is not None:
            if piece.block != like.block:
                raise KernelArgumentError("pieces", "blocks differ within a weight")
            rows = len(piece.codes)
            put(words, first, piece.codes.contiguous().view(torch.int32))
            expanded = piece.scales.repeat_interleave(piece.block[0], 0)[:rows]
            expanded = expanded.repeat_interleave(min(piece.block[1], depth) // group, 1)
            put(scales, first, expanded[:, : depth // group])
            first += rows
            piece = next(pieces, None)
        return cls(
            words,
            scales,
            None,
            kind="FLOAT8",
            columns=columns,
            depth=depth,
            group=group,
            bias=bias,
            dynamic=False,
        )


class PackedIntegers(PackedCodes):
    """A weight of integer codes, packed for compiled CPU code."""

    @classmethod
    def of(
        cls,
        pieces: Iterable[IntegerCodes],
        columns: int,
        depth: int,
        bias: torch.Tensor | None = None,
        *,
        dynamic: bool = False,
    ) -> PackedIntegers:
        """Pack `[n, K]` pieces, stacked by rows, all of the same kind, group and scale type.

        Args:
            pieces: the codes.
            columns, depth: N and K of all of them.
            bias: `[N]` or None.
            dynamic: quantise activations to int8, per row and group of k.

        Raises:
            KernelArgumentError: pieces that differ, or unsupported groups.
        """
        pieces = iter(pieces)
        piece: IntegerCodes | None = next(pieces)
        assert piece is not None
        like, group = piece, packed_group(piece.group, depth)
        words = panels(columns, depth * like.bits // 32, torch.int32)
        scales = panels(columns, depth // group, like.scales.dtype)
        zeros: torch.Tensor | None = None
        factors = None if like.factors is None else panels(columns, 1, torch.float32)
        if like.floored and like.bits == 8:
            raise KernelArgumentError("pieces", "codes of 8 bits have no minima")
        outer = floors = None
        if like.outer is not None:
            outer = panels(columns, depth // like.outer.size, torch.float16)
            floors = torch.zeros_like(outer) if like.floored else None
        first = 0
        while piece is not None:
            if (piece.bits, piece.float4, piece.group) != (like.bits, like.float4, like.group):
                raise KernelArgumentError("pieces", "kinds or groups differ within a weight")
            if piece.scales.dtype != scales.dtype or piece.floored != like.floored:
                raise KernelArgumentError("pieces", "types of scales differ within a weight")
            put(words, first, _words(piece))
            put(scales, first, _repeated(piece.scales, piece.group // group))
            if piece.zeros is not None and zeros is None:
                zeros = panels(columns, depth // group, torch.uint8, 1 << (like.bits - 1))
            if piece.zeros is not None and zeros is not None:
                put(zeros, first, _repeated(piece.zeros, piece.group // group))
            if piece.factors is not None and factors is not None:
                put(factors, first, piece.factors[:, None])
            if piece.outer is not None and outer is not None:
                put(outer, first, piece.outer.scales)
                if piece.outer.floors is not None and floors is not None:
                    put(floors, first, piece.outer.floors)
            first += piece.codes.shape[0]
            piece = next(pieces, None)
        return cls(
            words,
            scales,
            zeros,
            factors,
            outer,
            floors,
            kind=_KINDS[like.bits, like.float4],
            columns=columns,
            depth=depth,
            group=group,
            bias=bias,
            dynamic=dynamic,
        )


def _words(piece: IntegerCodes) -> torch.Tensor:
    """Pack codes into int32 `[n, K * bits / 32]`."""
    codes = piece.codes.contiguous()
    if piece.bits == 4:
        codes = _halves(codes)
    elif piece.bits == 6:
        low = _halves(codes & 15).view(len(codes), -1, 2, 4)
        fours = codes.view(len(codes), -1, 4, 4) >> 4
        high = fours[:, :, 0] | fours[:, :, 1] << 2 | fours[:, :, 2] << 4 | fours[:, :, 3] << 6
        codes = torch.cat([low, high.unsqueeze(2)], 2).flatten(1)
    return codes.view(torch.int32)


def _halves(codes: torch.Tensor) -> torch.Tensor:
    """Pack four-bit codes into uint8 `[n, K / 2]`."""
    eights = codes.view(len(codes), -1, 2, 4)
    return (eights[:, :, 0] | eights[:, :, 1] << 4).flatten(1)


def _repeated(values: torch.Tensor, times: int) -> torch.Tensor:
    return values.repeat_interleave(times, 1) if times > 1 else values
