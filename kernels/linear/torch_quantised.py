"""Quantised weights kept as codes, multiplied by Triton on GPUs and by torch on CPUs.

GPUs multiply by the codes in `codes_triton.py`. On a CPU without compiled kernels, every call
expands them to float32 and multiplies in it, whatever the dtype of the activations.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.elementwise import silu_times
from vlm_serve.kernels.linear.base import CHUNK_BYTES, ChangedRows, Epilogue, Linear
from vlm_serve.kernels.linear.codes import Codes
from vlm_serve.kernels.linear.few_rows import MOST_ROWS, Around
from vlm_serve.kernels.linear.fixed import MIN_COLUMNS, fixed_product, followed
from vlm_serve.kernels.linear.low_rank import extended
from vlm_serve.kernels.linear.low_rank_factors import Reduced
from vlm_serve.kernels.linear.stored_codes import Stored, stored
from vlm_serve.kernels.norms import Normed


class TorchQuantised(Linear):
    """A quantised weight on a GPU, or on a CPU without a compiler.

    Args:
        weight: its codes.
        columns, depth: N and K.
        bias: float32 `[N]` or None.
    """

    def __init__(self, weight: Stored, columns: int, depth: int, bias: torch.Tensor | None) -> None:
        self.columns, self.depth = columns, depth
        self.dtype = weight.codes.dtype
        self._weight, self._bias = weight, bias

    @classmethod
    def of(
        cls,
        pieces: Iterable[Codes],
        columns: int,
        depth: int,
        bias: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> TorchQuantised:
        """Store pieces of `[n, K]` codes of one kind, stacked by rows.

        Raises:
            KernelArgumentError: pieces of several kinds, or of an unsupported one.
        """
        device = device or torch.device("cpu")
        bias = None if bias is None else bias.to(device, torch.float32)
        return cls(stored(pieces, columns, depth, device), columns, depth, bias)

    def _multiply(self, x: torch.Tensor, after: Epilogue, deterministic: bool) -> torch.Tensor:
        """Multiply; on a CPU `deterministic` pads as `fixed_product` does."""
        kind = torch.float32 if after.activation or after.times is not None else x.dtype
        if self._few(x, deterministic):
            # Its kernel adds `plus` itself.
            out = self._of_few(x, Around(plus=after.plus, overwrite=after.overwrite), kind)
            return followed(out, after._replace(plus=None)).to(x.dtype)
        kind = kind if after.plus is None else torch.float32
        return followed(self._of_many(x, kind, deterministic), after).to(x.dtype)

    def with_change(
        self, x: torch.Tensor, after: Epilogue, deterministic: bool, change: Reduced
    ) -> torch.Tensor:
        if self._few(x, deterministic):
            sums = self._of_few(x, Around(), torch.float32)
        else:
            sums = self._of_many(x, torch.float32, deterministic)
        out = followed(sums, after).to(x.dtype, copy=True)
        extended(x.device, out, sums, after, change)
        return out

    def _few(self, x: torch.Tensor, deterministic: bool) -> bool:
        """Return True if a kernel for so few rows multiplies; it has other tiles than others."""
        few = not deterministic and 0 < x.shape[0] <= MOST_ROWS and _few_codes.on_triton(x.device)
        return few and self._weight.table is None

    def _of_few(self, x: torch.Tensor, around: Around, kind: torch.dtype) -> torch.Tensor:
        return _few_codes(x.device, x, self._weight, self._bias, around, kind)

    def _of_many(self, x: torch.Tensor, kind: torch.dtype, deterministic: bool) -> torch.Tensor:
        weight, bias = self._weight, self._bias
        if weight.table is not None:
            return _expanded(x, weight, bias, kind, deterministic=deterministic)
        return _product(x.device, x, weight, bias, kind, deterministic=deterministic)

    def of_norm(
        self,
        x: Normed,
        *,
        gated: bool = False,
        widened: bool = False,
        deterministic: bool = False,
        changes: ChangedRows | None = None,
    ) -> torch.Tensor:
        if not gated or widened or changes is not None or not self._few(x.raw, deterministic):
            return super().of_norm(
                x, gated=gated, widened=widened, deterministic=deterministic, changes=changes
            )
        return self._of_few(x.rows, Around(gated=True), x.rows.dtype)

    def _gated(self, up: Linear, x: torch.Tensor, deterministic: bool) -> torch.Tensor:
        gate = self(x, deterministic=deterministic)
        return silu_times(gate, up(x, deterministic=deterministic))

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)


def _expanded(
    x: torch.Tensor,
    weight: Stored,
    bias: torch.Tensor | None,
    out: torch.dtype,
    *,
    deterministic: bool,
) -> torch.Tensor:
    """Multiply x `[T, K]` by the expanded weight and add the bias, in the dtype `out`.
    Some rows at a time if it has a table: as a whole it would take up to sixteen times as much.
    """
    wide, rows = x.float(), len(weight.codes)
    step = rows if weight.table is None else max(MIN_COLUMNS, CHUNK_BYTES // (4 * weight.depth))
    plain = (weight.plain(slice(first, first + step)) for first in range(0, rows, step))
    parts = [
        fixed_product(x.device, wide, each) if deterministic else F.linear(wide, each)
        for each in plain
    ]
    result = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return (result if bias is None else result + bias).to(out)


def _few_by_torch(
    x: torch.Tensor, weight: Stored, bias: torch.Tensor | None, around: Around, out: torch.dtype
) -> torch.Tensor:
    """Multiply up to 8 rows, with the gate or the sum of `around`; results have the dtype `out`."""
    result = _expanded(x, weight, bias, torch.float32, deterministic=False)
    if around.gated:
        result = silu_times(*result.to(x.dtype).chunk(2, dim=1))
    if around.plus is not None:
        result = result + around.plus
        if around.overwrite:
            return around.plus.copy_(result)
    return result.to(out)


_product = Op(_expanded, triton="vlm_serve.kernels.linear.codes_triton:product")
_few_codes = Op(_few_by_torch, triton="vlm_serve.kernels.linear.few_codes_triton:few_codes")
