"""e4m3 codes with scales per block or output channel, packed for compiled CPU code.

`native/codes/grouped.h` describes their layout and arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear.codes import Float8Codes
from vlm_serve.kernels.linear.packed_codes import PackedCodes, packed_group, panels, put


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
            own = piece.scales.repeat_interleave(piece.block[0], 0)[:rows]
            own = own.repeat_interleave(min(piece.block[1], depth) // group, 1)
            put(scales, first, own[:, : depth // group])
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
