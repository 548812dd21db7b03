"""Products with sigmoid and SiLU on a GPU: one launch instead of one per operation.

Launches dominate short steps there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.elementwise import reference
from vlm_serve.kernels.triton_support import launch

_BLOCK = 1024


@triton.jit
def _product_kernel(
    x,
    gate,
    out,
    width,
    x_stride,
    gate_stride,
    COLUMN: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute `x * sigmoid(gate)`, times `gate` as well if SILU; COLUMN: the gate has one
    column."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if COLUMN:
        gates = tl.load(gate + row * gate_stride).to(tl.float32)
    else:
        gates = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        values *= gates
    result = values / (1.0 + tl.exp(-gates))
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=inside)


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    alike = x.dim() == 2 and _dense(x) and _dense(gate) and gate.shape[0] == x.shape[0]
    if not alike or gate.shape[1] not in (1, x.shape[1]):
        return reference.times_sigmoid(x, gate)
    return _product(x, gate, silu=False)


def silu_times(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 2 or not (_dense(x) and _dense(gate)):
        return reference.silu_times(gate, x)
    return _product(x, gate, silu=True)


def _dense(x: torch.Tensor) -> bool:
    return x.dim() == 2 and (x.stride(1) == 1 or x.shape[1] == 1)


def _product(x: torch.Tensor, gate: torch.Tensor, *, silu: bool) -> torch.Tensor:
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    arguments = {
        "x": x,
        "gate": gate,
        "out": out,
        "width": width,
        "x_stride": x.stride(0),
        "gate_stride": gate.stride(0),
        "COLUMN": gate.shape[1] != width,
        "SILU": silu,
        "BLOCK": _BLOCK,
    }
    launch(_product_kernel, (rows, triton.cdiv(width, _BLOCK)), arguments, num_warps=4)
    return out
