"""Dense weights in our own layout (`native/products/product.h`), multiplied by compiled CPU code.

One layout and one arithmetic serve one row and thousands: a row's bits depend on the row and the
weight alone. The weight keeps its dtype. If the processor has no products of that dtype, values are
widened in registers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

from vlm_serve.kernels.large_pages import zeros
from vlm_serve.kernels.linear.base import WeightRecord
from vlm_serve.kernels.linear.packed import PANEL, Packed
from vlm_serve.kernels.native_layout import constant, struct
from vlm_serve.kernels.native_library import call

TYPES = {
    torch.float32: constant("FLOAT32"),
    torch.bfloat16: constant("BFLOAT16"),
    torch.float16: constant("FLOAT16"),
}
"""Constants of compiled code by dtype."""

_Packing = struct("Packing")


class PackedDense(Packed):
    """A packed weight: `[ceil(N / 32), K, 32]`, or `[ceil(N / 32), ceil(K / 2), 32, 2]` of
    bfloat16.

    Args:
        packed: one-dimensional, made by `of`.
        columns, depth: N and K.
        bias: float32 `[N]` or None.
    """

    def __init__(
        self, packed: torch.Tensor, columns: int, depth: int, bias: torch.Tensor | None
    ) -> None:
        record = WeightRecord(
            packed=packed.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            columns=columns,
            depth=depth,
            type=TYPES[packed.dtype],
        )
        super().__init__(record, packed.dtype, packed, bias)
        self._packed = packed

    @classmethod
    def of(
        cls,
        pieces: Iterable[torch.Tensor],
        columns: int,
        depth: int,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> PackedDense:
        """Pack `[n, K]` pieces of `dtype`, stacked by rows.

        Raises:
            BuildError: there is no compiled code.
        """
        padded = -(-depth // 2) * 2 if dtype == torch.bfloat16 else depth
        packed = zeros(-(-columns // PANEL) * PANEL * padded, dtype=dtype)
        first = 0
        for piece in pieces:
            piece = piece if piece.stride(-1) == 1 else piece.contiguous()
            job = _Packing(
                source=piece.data_ptr(),
                packed=packed.data_ptr(),
                rows=piece.shape[0],
                stride=piece.stride(0),
                depth=depth,
                first=first,
                type=TYPES[dtype],
                threads=torch.get_num_threads(),
            )
            call("vlm_pack", ctypes.byref(job))
            first += piece.shape[0]
        return cls(packed, columns, depth, None if bias is None else bias.float().contiguous())

    def plain(self) -> torch.Tensor:
        """Unpack the weight to `[N, K]`."""
        pair = 2 if self.dtype == torch.bfloat16 else 1
        panels = self._packed.view(-(-self.columns // PANEL), -1, PANEL, pair)
        rows = panels.transpose(1, 2).flatten(2).flatten(0, 1)
        return rows[: self.columns, : self.depth]
