"""int8, int6, int4 and e2m1 codes in groups of k, packed for compiled CPU code.

They have scales, and may have zero points. `native/codes/grouped.h` describes their layout and
arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear.codes import IntegerCodes
from vlm_serve.kernels.linear.packed_codes import PackedCodes, packed_group, panels, put

_KINDS = {(8, False): "INT8", (6, False): "INT6", (4, False): "INT4", (4, True): "FLOAT4"}


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
