"""Products of a few rows with plain weights on a GPU: norm, product and what follows in one launch.

A decode step at small batch reads each weight once and does little else, so its launches take a
good part of its time. Sums have one order, whatever the number of rows: a row has the same bits
alone and beside seven others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.elementwise import reference as elementwise
from vlm_serve.kernels.linear.low_rank_factors import Reduced, addition
from vlm_serve.kernels.norms import reference as norms

MOST_ROWS = 8


class Around(NamedTuple):
    """Operations around a product.

    Attributes:
        norm: float `[K]`, weight of a zero-centred RMS norm before it; None: no norm.
        eps: of the norm.
        gated: True if the weight stacks two of N rows each, gate and up: the result is
            `silu(gate) * up`.
        plus: `[T, N]`, added to the result; not beside `gated`.
        overwrite: True if the result takes the place of `plus`.
        widened: True for a float32 result; it is rounded to the dtype of x all the same.
        change: adapters' changes of the product; None: none.
    """

    norm: torch.Tensor | None = None
    eps: float = 0.0
    gated: bool = False
    plus: torch.Tensor | None = None
    overwrite: bool = False
    widened: bool = False
    change: Reduced | None = None


def _by_torch(x: torch.Tensor, weight: torch.Tensor, around: Around) -> torch.Tensor:
    normed = x
    if around.norm is not None:
        normed = norms.rms_norm(x, around.norm, around.eps)
    if around.change is None:
        out = F.linear(normed, weight)
    else:
        added = addition(around.change, len(weight))
        if around.norm is not None:  # u has not had the factors of rows
            added *= torch.rsqrt(x.float().square().mean(1, keepdim=True) + around.eps)
        out = (F.linear(normed.float(), weight.float()) + added).to(x.dtype)
    if around.gated:
        out = elementwise.silu_times(*out.chunk(2, dim=1))
    if around.plus is not None:
        out = out + around.plus
        if around.overwrite:
            out = around.plus.copy_(out)
    return out.float() if around.widened else out


_few = Op(_by_torch, triton="vlm_serve.kernels.linear.few_rows_triton:few_rows")


def serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if `few_rows` is the way to multiply x `[T, K]`: up to 8 rows, on Triton."""
    return 0 < x.shape[0] <= MOST_ROWS and x.dtype == weight.dtype and _few.on_triton(x.device)


def few_rows(x: torch.Tensor, weight: torch.Tensor, around: Around) -> torch.Tensor:
    """Compute `x @ weight.T` and what is around it.

    The norm's factor of a row multiplies the sums behind the product. So float16 rows cannot have a
    norm here: before it they may be too large.

    Args:
        x: `[T, K]` with T up to 8, dense rows.
        weight: `[N, K]` or, gated, `[2 N, K]`, in the dtype of x, dense rows.
        around: the rest.

    Returns:
        `[T, N]`.
    """
    return _few(x.device, x, weight, around)
