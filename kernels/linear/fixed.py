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

MIN_ROWS = 16
MIN_COLUMNS = 16
NOTHING = Epilogue()

_GPU_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def fixed_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    after: Epilogue = NOTHING,
    kind: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute `x @ weight.T + bias` and what follows it; a row's bits depend on the row alone.

    Args:
        x: `[T, K]`, dense rows.
        weight: `[N, K]` in the dtype of x, dense rows.
        bias: `[N]` or None.
        after: what follows.
        kind: dtype of the result; None: that of x.

    Returns:
        `[T, N]`.
    """
    return _fixed(x.device, x, weight, bias, after, kind or x.dtype)


def _by_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    after: Epilogue,
    kind: torch.dtype,
) -> torch.Tensor:
    """Multiply whole tiles of 16 rows: in them a CPU's bits do not depend on the number of rows
    (measured, float32 and bfloat16). One column would take a GEMV path: there are 16 then."""
    rows, columns = len(x), len(weight)
    padded = max(1, -(-rows // MIN_ROWS)) * MIN_ROWS
    if columns == 1:
        weight = with_rows(weight, MIN_COLUMNS)
        bias = None if bias is None else with_rows(bias, MIN_COLUMNS)
    bias = None if bias is None else bias.to(kind)
    out = F.linear(with_rows(x, padded).to(kind), weight.to(kind), bias)
    return followed(out, after.of(lambda part: with_rows(part, padded)))[:rows, :columns]


_fixed = Op(_by_torch, triton="vlm_serve.kernels.linear.fixed_triton:product")


def on_kernels(device: torch.device) -> bool:
    """Return True if a kernel computes fixed products on a device: its float32 sums are those that
    it rounds."""
    return _fixed.on_triton(device)


def followed(out: torch.Tensor, after: Epilogue) -> torch.Tensor:
    """Return what follows products, by torch."""
    if after.activation is not None:
        on_cpu = out.device.type == "cpu"
        out = (ACTIVATIONS if on_cpu else _GPU_ACTIVATIONS)[after.activation](out)
    if after.times is not None:
        out = out * after.times
    return out if after.plus is None else out + after.plus


def with_rows(part: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a tensor with rows of zeros behind its own."""
    if part.shape[0] == rows:
        return part
    return torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])
