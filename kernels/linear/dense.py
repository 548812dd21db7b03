"""Dense weights in our own layout (`native/products/product.h`), multiplied by compiled CPU code.

One layout and one arithmetic serve one row and thousands: a row's bits depend on the row and the
weight alone. The weight keeps its dtype. If the processor has no products of that dtype, values are
widened in registers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vlm_serve.kernels.large_pages import zeros
from vlm_serve.kernels.linear.base import WeightRecord
from vlm_serve.kernels.linear.low_rank_factors import LowRankChange, Up
from vlm_serve.kernels.linear.packed import PANEL, PackedLinear
from vlm_serve.kernels.native_layout import constant, struct
from vlm_serve.kernels.native_library import call

TYPES = {
    torch.float32: constant("FLOAT32"),
    torch.bfloat16: constant("BFLOAT16"),
    torch.float16: constant("FLOAT16"),
}
"""Constants of compiled code by dtype."""

_Packing, _Part, _Change = map(struct, ("Packing", "LowRankPart", "LowRankChange"))


class PackedDense(PackedLinear):
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
        *,
        lasting: bool = True,
    ) -> PackedDense:
        """Pack `[n, K]` pieces of `dtype`, stacked by rows.

        Args:
            lasting: it stays as long as the model. Else it lies in the heap: arenas of large pages
                take no place twice while one of their tensors lives.

        Raises:
            BuildError: there is no compiled code.
        """
        padded = -(-depth // 2) * 2 if dtype == torch.bfloat16 else depth
        allocate = zeros if lasting else torch.zeros
        packed = allocate(-(-columns // PANEL) * PANEL * padded, dtype=dtype)
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


class PackedChanges:
    """An adapter's changes of all sites, packed: in the layout of `native/products/low_rank.h`.

    Attributes:
        address: of the records of all sites, for compiled code; valid as long as this object lives.
        nbytes: in memory.
    """

    def __init__(self, by_site: Mapping[int, LowRankChange], sites: int) -> None:
        self._kept: list[object] = []
        self.nbytes = 0
        records = [
            self._record(by_site[site]) if site in by_site else _Change()
            for site in range(sites + 1)
        ]
        self._records = (_Change * len(records))(*records)
        self.address = ctypes.addressof(self._records)

    def _record(self, change: LowRankChange) -> Any:
        """Lay out a change, and return its record."""
        whole = change.down
        rank, depth = whole.shape
        down = PackedDense.of([whole], rank, depth, whole.dtype, lasting=False)
        scales, panels = change.scales.contiguous(), [_panels(up) for up in change.ups]
        parts = [
            _Part(
                first=up.first // PANEL,
                last=up.first // PANEL + len(panel),
                offset=up.offset,
                rank=up.values.shape[1],
                up=panel.data_ptr(),
            )
            for up, panel in zip(change.ups, panels, strict=True)
        ]
        listed = (_Part * len(parts))(*parts)
        self._kept += [down, scales, panels, listed]
        self.nbytes += down.nbytes + sum(panel.nbytes for panel in panels)
        return _Change(
            down=down.record(),
            scales=scales.data_ptr(),
            count=len(parts),
            parts=ctypes.addressof(listed),
        )


def _panels(up: Up) -> torch.Tensor:
    """Lay columns out as float32 `[panels, rank, 32]`, with zeros where others' columns are."""
    count, rank = up.values.shape
    skip = up.first % PANEL
    panels = -(-(skip + count) // PANEL)
    wide = torch.zeros(panels * PANEL, rank)
    wide[skip : skip + count] = up.values
    return wide.view(panels, PANEL, rank).transpose(1, 2).contiguous()
