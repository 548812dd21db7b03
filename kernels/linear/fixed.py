"""Products whose rows have the same bits in any call: on a GPU one tile and one order over K.

A library chooses an algorithm by the number of rows. So a row's last bits depend on how many are
beside it, and in some code on its place in a partial tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.elementwise import ACTIVATIONS
from vlm_serve.kernels.linear.base import Activation, Epilogue
from vlm_serve.kernels.linear.low_rank_factors import Reduced, addition, changes_at

MIN_ROWS = 16
MIN_COLUMNS = 16
NOTHING = Epilogue()


def _by_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    after: Epilogue = NOTHING,
    kind: torch.dtype | None = None,
    change: Reduced | None = None,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `x @ weight.T + bias` and what follows it, `[T, N]`, in the dtype `kind` or that of
    x; x and weight have dense rows. On a CPU whole tiles of 16 rows keep bits (measured, float32
    and bfloat16), and one column would take a GEMV path.

    `change` is added to the sums before they are rounded: without `into` an activation or a factor
    may not follow. With `into`, `[T, N]`, only rows that have a change are computed, and written
    there.
    """
    if change is not None:
        return _changed_by_torch(x, weight, bias, after, change, into)
    rows, columns = len(x), len(weight)
    padded = max(1, -(-rows // MIN_ROWS)) * MIN_ROWS
    if columns == 1:
        weight = with_rows(weight, MIN_COLUMNS)
        bias = None if bias is None else with_rows(bias, MIN_COLUMNS)
    kind = kind or x.dtype
    bias = None if bias is None else bias.to(kind)
    out = F.linear(with_rows(x, padded).to(kind), weight.to(kind), bias)
    return followed(out, after.of(lambda part: with_rows(part, padded)))[:rows, :columns]


def _changed_by_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    after: Epilogue,
    change: Reduced,
    into: torch.Tensor | None,
) -> torch.Tensor:
    sums = _by_torch(x, weight, bias, kind=torch.float32) + addition(change, len(weight))
    out = followed(sums, after).to(x.dtype)
    if into is None:
        return out
    for _, rows in changes_at(change.site):
        into[rows] = out[rows]
    return into


fixed_product = Op(_by_torch, triton="vlm_serve.kernels.linear.fixed_triton:product")


def followed(out: torch.Tensor, after: Epilogue) -> torch.Tensor:
    """Return what follows products, by torch."""
    if after.activation is not None:
        on_cpu = out.device.type == "cpu"
        out = (ACTIVATIONS if on_cpu else _GPU_ACTIVATIONS)[after.activation](out)
    if after.times is not None:
        out = out * after.times
    return out if after.plus is None else out + after.plus


_GPU_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square_(),
}


def with_rows(part: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a tensor with rows of zeros behind its own."""
    if part.shape[0] == rows:
        return part
    return torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])
