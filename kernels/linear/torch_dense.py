"""Dense weights multiplied by torch: on GPUs, and on CPUs without compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter

import torch
import torch.nn.functional as F

from vlm_serve.kernels.elementwise import ACTIVATIONS, silu_times
from vlm_serve.kernels.linear.base import Activation, ChangedRows, Epilogue, Linear
from vlm_serve.kernels.linear.few_rows import Around, few_rows, serves
from vlm_serve.kernels.norms import Normed

MIN_ROWS = 16
MIN_COLUMNS = 16
ROWS_AT_ONCE = 128
"""Rows of a deterministic product on a GPU."""

_GPU_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class TorchDense(Linear):
    """A dense weight, multiplied by torch.

    Args:
        weight: `[N, K]`.
        bias: `[N]` or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.columns, self.depth = weight.shape
        self.dtype = weight.dtype
        self._weight, self._bias = weight, bias

    @classmethod
    def of(
        cls,
        pieces: Iterable[torch.Tensor],
        columns: int,
        depth: int,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        device: torch.device,
    ) -> TorchDense:
        """Stack `[n, K]` pieces by rows."""
        weight = torch.empty(columns, depth, dtype=dtype, device=device)
        first = 0
        for piece in pieces:
            weight[first : first + piece.shape[0]] = piece
            first += piece.shape[0]
        return cls(weight, None if bias is None else bias.to(device, dtype))

    def _multiply(self, x: torch.Tensor, after: Epilogue, deterministic: bool) -> torch.Tensor:
        """Multiply; `deterministic` pads rows and columns to whole tiles.

        A GEMM library picks another algorithm for a handful of rows. A row's last bits then depend
        on the number of rows in the call, and in some code on its place in a partial tile. In whole
        tiles of 16 rows they do not (measured, float32 and bfloat16). One exception remains:
        one-column products take a GEMV path. `deterministic` pads both away. On a GPU, algorithms
        depend on the number of rows at every size, so products always have the same number.
        """
        if not deterministic:
            if after.activation is None and after.times is None and self._few(x):
                around = Around(plus=after.plus, overwrite=after.overwrite)
                return few_rows(x, self._weight, around)
            return self._product(x, self._weight, self._bias, after)
        rows, weight, bias = x.shape[0], self._weight, self._bias
        if self.columns == 1:
            weight = with_rows(weight, MIN_COLUMNS)
            bias = None if bias is None else with_rows(bias, MIN_COLUMNS)
        after = after.of(lambda part: with_rows(part, _padded(rows, x.device)))
        out = in_tiles(
            x, lambda tile, rows: self._product(tile, weight, bias, after.of(itemgetter(rows)))
        )
        return out[:, : self.columns]

    def of_norm(
        self,
        x: Normed,
        *,
        gated: bool = False,
        widened: bool = False,
        deterministic: bool = False,
        changes: ChangedRows | None = None,
    ) -> torch.Tensor:
        # float16 has no room for rows before their norm.
        if deterministic or x.raw.dtype == torch.float16 or not self._few(x.raw):
            return super().of_norm(
                x, gated=gated, widened=widened, deterministic=deterministic, changes=changes
            )
        change = None if changes is None else changes.few(self.site, x.raw, x.weight)
        around = Around(x.weight, x.eps, gated=gated, widened=widened, change=change)
        return few_rows(x.raw, self._weight, around)

    def _changed(
        self, x: torch.Tensor, after: Epilogue, deterministic: bool, changes: ChangedRows | None
    ) -> torch.Tensor:
        plain = after.activation is None and after.times is None
        if changes is None or deterministic or not plain or not self._few(x):
            return super()._changed(x, after, deterministic, changes)
        change = changes.few(self.site, x)
        around = Around(plus=after.plus, overwrite=after.overwrite, change=change)
        return few_rows(x, self._weight, around)

    def _few(self, x: torch.Tensor) -> bool:
        """Return True if `few_rows` multiplies; decoders' projections have no bias."""
        return self._bias is None and serves(x, self._weight)

    def _gated(self, up: Linear, x: torch.Tensor, deterministic: bool) -> torch.Tensor:
        gate = self(x, deterministic=deterministic)
        return silu_times(gate, up(x, deterministic=deterministic))

    def _partial(self, x: torch.Tensor, deterministic: bool) -> torch.Tensor:
        if x.dtype == torch.float32:
            return self(x, deterministic=deterministic)
        weight = self._weight
        wide = weight.float() if x.device.type == "cpu" else None

        def product(rows: torch.Tensor, _: slice) -> torch.Tensor:
            if wide is not None:
                return F.linear(rows.float(), wide)
            return torch.mm(rows, weight.T, out_dtype=torch.float32)

        out = in_tiles(x, product) if deterministic else product(x, slice(None))
        return out if self._bias is None else out + self._bias.float()

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, after: Epilogue
    ) -> torch.Tensor:
        activation, times, plus, overwrite = after
        on_cpu = x.device.type == "cpu"
        if plus is not None and bias is None and not on_cpu:
            # Rounded once. Out of place, torch copies `plus` first, in a launch of its own.
            return plus.addmm_(x, weight.T) if overwrite else torch.addmm(plus, x, weight.T)
        out = F.linear(x, weight, bias)
        if activation is not None:
            out = (ACTIVATIONS if on_cpu else _GPU_ACTIVATIONS)[activation](out)
        if times is not None:
            out = out * times
        return out if plus is None else out + plus


def in_tiles(
    x: torch.Tensor, product: Callable[[torch.Tensor, slice], torch.Tensor]
) -> torch.Tensor:
    """Multiply x `[T, K]`, padded with zeros, in calls whose number of rows does not change a row's
    bits.

    Args:
        x: the rows.
        product: of some rows, which are these of the padded ones.
    """
    rows, padded = x.shape[0], _padded(x.shape[0], x.device)
    x = with_rows(x, padded)
    step = padded if x.device.type == "cpu" else ROWS_AT_ONCE
    tiles = [
        product(x[tile], tile)
        for tile in (slice(first, first + step) for first in range(0, padded, step))
    ]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:rows]


def _padded(rows: int, device: torch.device) -> int:
    """Return the rows of whole tiles, at least one."""
    least = MIN_ROWS if device.type == "cpu" else ROWS_AT_ONCE
    return max(1, -(-rows // least)) * least


def with_rows(part: torch.Tensor, rows: int) -> torch.Tensor:
    if part.shape[0] == rows:
        return part
    return torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])
