"""Dense projections; the GEMMs of every layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

MIN_ROWS = 16
MIN_COLUMNS = 16


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """`x @ weight.T + bias`.

    A GEMM library picks another algorithm for a handful of rows, so a row's last bits depend on how
    many rows share the call. From 16 rows on they do not (measured, fp32 and bf16), except that
    one-column products take a GEMV path of their own. `deterministic` pads both away.

    Args:
        x: `[T, K]` activations.
        weight: `[N, K]`.
        bias: `[N]` or None.
        deterministic: give a row the same bits in any batch.

    Returns:
        `[T, N]` in the dtype of x.
    """
    if not deterministic:
        return F.linear(x, weight, bias)
    rows, columns = x.shape[0], weight.shape[0]
    if rows < MIN_ROWS:
        x = torch.cat([x, x.new_zeros(MIN_ROWS - rows, x.shape[1])])
    if columns == 1:
        weight = torch.cat([weight, weight.new_zeros(MIN_COLUMNS - 1, weight.shape[1])])
        bias = None if bias is None else torch.cat([bias, bias.new_zeros(MIN_COLUMNS - 1)])
    return F.linear(x, weight, bias)[:rows, :columns]
