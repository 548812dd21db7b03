"""Dense projections; the GEMMs of every layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

MIN_ROWS = 16
MIN_COLUMNS = 16


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight in the layout that `linear` reads fastest, once, when a model is loaded.

    On a CPU that is oneDNN's blocked layout: for a few rows it is read at memory speed, where a
    row-major weight takes 1.4 to 3 times as long (measured at 1 and 8 rows, float32 and bfloat16);
    for thousands of rows it costs nothing. The result is opaque: only `linear` understands it.
    Elsewhere, and for types without such kernels, the weight itself is returned.

    Args:
        weight: `[N, K]`.
    """
    if weight.device.type != "cpu" or weight.dtype not in _packable_dtypes():
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), MIN_ROWS)
    return packed


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """`x @ weight.T + bias`.

    A GEMM library picks another algorithm for a handful of rows, so a row's last bits depend on how
    many rows share the call. From 16 rows on they do not (measured, fp32 and bf16, packed or not),
    except that one-column products of a plain weight take a GEMV path of their own.
    `deterministic` pads both away.

    Args:
        x: `[T, K]` activations.
        weight: `[N, K]`, as it is or from `pack`.
        bias: `[N]` or None.
        deterministic: give a row the same bits in any batch.

    Returns:
        `[T, N]` in the dtype of x.
    """
    if not deterministic:
        return _product(x, weight, bias)
    rows, columns = x.shape[0], weight.shape[0]
    if rows < MIN_ROWS:
        x = torch.cat([x, x.new_zeros(MIN_ROWS - rows, x.shape[1])])
    if columns == 1 and not weight.is_mkldnn:
        weight = torch.cat([weight, weight.new_zeros(MIN_COLUMNS - 1, weight.shape[1])])
        bias = None if bias is None else torch.cat([bias, bias.new_zeros(MIN_COLUMNS - 1)])
    return _product(x, weight, bias)[:rows, :columns]


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if weight.is_mkldnn:
        product: torch.Tensor = _packed_product(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


def _packable_dtypes() -> tuple[torch.dtype, ...]:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return ()
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return (torch.float32, torch.bfloat16)
    return (torch.float32,)


# The overload itself: looking it up anew costs more than a small product.
_packed_product = torch.ops.mkldnn._linear_pointwise.default
