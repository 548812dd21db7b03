"""RMS norms on a GPU: one pass over a row, reduced in float32."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.triton_support import launch, power_of_two
from vlm_serve.kernels.triton_views import heads as strided


@triton.jit
def _rms_kernel(
    x,
    weight,
    out,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    factor = 1.0 + tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = wide * scale * factor
    tl.store(out + row * SIZE + columns, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    block = power_of_two(size)
    arguments = {
        "x": rows,
        "weight": weight,
        "out": out,
        "x_stride": rows.stride(0),
        "eps": eps,
        "SIZE": size,
        "BLOCK": block,
    }
    launch(_rms_kernel, (rows.shape[0],), arguments, num_warps=min(8, max(1, block // 512)))
    return out.view(x.shape)


@triton.jit
def gated_rows(values, gates, factor, eps, SIZE: tl.constexpr):
    """Compute `gated_rms_norm` of rows of SIZE values, zeros behind them, in float32."""
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    # As in transformers, round to the input's dtype before the weight and before the gate.
    normed = (wide * scale[:, None]).to(values.dtype).to(tl.float32)
    normed = normed * factor.to(tl.float32)[None, :]
    if factor.dtype == values.dtype:
        normed = normed.to(values.dtype).to(tl.float32)
    gates = gates.to(tl.float32)
    return normed * (gates * tl.sigmoid(gates))


@triton.jit
def _gated_kernel(
    x,
    gate,
    weight,
    out,
    rows,
    heads,
    x_token_stride,
    x_head_stride,
    gate_token_stride,
    gate_head_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // heads, row % heads
    columns = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (columns < SIZE)[None, :]
    x_row = token * x_token_stride + head * x_head_stride
    gate_row = token * gate_token_stride + head * gate_head_stride
    values = tl.load(x + x_row[:, None] + columns[None, :], mask=inside, other=0.0)
    gates = tl.load(gate + gate_row[:, None] + columns[None, :], mask=inside, other=0.0)
    factor = tl.load(weight + columns, mask=columns < SIZE, other=0.0)
    result = gated_rows(values, gates, factor, eps, SIZE)
    places = row[:, None] * SIZE + columns[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_row(x, gate, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Gate this program's head of its token; return its place among all, and its values."""
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    own = x.at + token * x.token + head * x.head + columns
    wide = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    own = gate.at + token * gate.token + head * gate.head + columns
    gates = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    return token * tl.num_programs(0) + head, wide * (gates * tl.sigmoid(gates))


@triton.jit
def _normed_gated_kernel(
    x, gate, weight, mean, out, weight_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Gate one head of a token, then norm it, with its own mean square or a given one."""
    place, wide = _gated_row(x, gate, SIZE, BLOCK)
    square = tl.sum(wide * wide, axis=0) / SIZE if mean is None else tl.load(mean + place)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    own = weight + tl.program_id(0) * weight_stride + columns
    factor = tl.load(own, mask=inside, other=0.0)
    normed = wide * tl.rsqrt(square + eps) * factor.to(tl.float32)
    tl.store(out + place * SIZE + columns, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _squares_kernel(x, gate, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Gate one head of a token, and sum its squares."""
    place, wide = _gated_row(x, gate, SIZE, BLOCK)
    tl.store(out + place, tl.sum(wide * wide, axis=0))


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    gate_first: bool = False,
    mean: torch.Tensor | None = None,
) -> torch.Tensor:
    wide, gates = _token_heads(x), _token_heads(gate)
    tokens, heads, size = wide.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power_of_two(size)
    if gate_first:
        arguments: dict[str, Any] = {
            "x": strided(wide),
            "gate": strided(gates),
            "weight": weight,
            "mean": None if mean is None else mean.contiguous(),
            "out": out,
            "weight_stride": weight.stride(0) if weight.dim() == 2 else 0,
            "eps": eps,
            "SIZE": size,
            "BLOCK": block,
        }
        launch(_normed_gated_kernel, (heads, tokens), arguments, num_warps=_warps(block))
        return out
    # About 2048 elements per program keep four warps busy with 16-byte loads.
    rows_per_program = max(1, 2048 // block)
    arguments = {
        "x": wide,
        "gate": gates,
        "weight": weight,
        "out": out,
        "rows": tokens * heads,
        "heads": heads,
        "x_token_stride": wide.stride(0),
        "x_head_stride": wide.stride(1),
        "gate_token_stride": gates.stride(0),
        "gate_head_stride": gates.stride(1),
        "eps": eps,
        "SIZE": size,
        "BLOCK": block,
        "ROWS": rows_per_program,
    }
    launch(_gated_kernel, (triton.cdiv(tokens * heads, rows_per_program),), arguments)
    return out


def gated_squares(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    wide, gates = _token_heads(x), _token_heads(gate)
    tokens, heads, size = wide.shape
    out = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    block = power_of_two(size)
    own = {"x": strided(wide), "gate": strided(gates)}
    arguments = {**own, "out": out, "SIZE": size, "BLOCK": block}
    launch(_squares_kernel, (heads, tokens), arguments, num_warps=_warps(block))
    return out


def _warps(block: int) -> int:
    """Return the warps of a program with one row of this many values."""
    return min(16, max(1, block // 512))


def _token_heads(x: torch.Tensor) -> torch.Tensor:
    """View as `[tokens, heads, size]`, without a copy for the layouts that the layers use."""
    if x.dim() == 3:
        return x
    return x.reshape(-1, 1, x.shape[-1])
