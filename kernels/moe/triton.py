"""Router and routed experts on a GPU: two grouped products over tokens sorted by expert."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear.codes_triton import code_arguments
from vlm_serve.kernels.linear.stored_codes import Stored
from vlm_serve.kernels.moe.align_triton import align
from vlm_serve.kernels.moe.beside import Beside
from vlm_serve.kernels.moe.codes_triton import down_codes_kernel, gate_up_codes_kernel
from vlm_serve.kernels.moe.pairs_triton import store_gated, store_weighted, tile_pairs
from vlm_serve.kernels.triton_support import current_target, dot_dtype, launch, power_of_two


# The number of tokens differs between steps: specialising on it would recompile while serving.
@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    logits,
    weights,
    ids,
    tokens,
    stride,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, BLOCK)
    inside = (row < tokens)[:, None] & (experts < EXPERTS)[None, :]
    places = row.to(tl.int64)[:, None] * stride + experts[None, :]
    left = tl.load(logits + places, mask=inside, other=float("-inf")).to(tl.float32)
    # Rows past the end stay finite; they are not stored.
    left = tl.where((row < tokens)[:, None], left, 0.0)
    left = tl.where((experts < EXPERTS)[None, :], left, float("-inf"))
    largest = tl.max(left, axis=1)
    ranks = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((ROWS, BLOCK_K), tl.int32)
    shares = tl.zeros((ROWS, BLOCK_K), tl.float32)
    # The softmax's denominator cancels in the renormalisation; the first of equals wins.
    for rank in range(TOP_K):
        value = tl.max(left, axis=1)
        first = tl.where(left == value[:, None], experts[None, :], BLOCK)
        # A NaN equals nothing; its row still names experts that exist.
        expert = tl.minimum(tl.min(first, axis=1), EXPERTS - 1)
        here = (ranks == rank)[None, :]
        chosen = tl.where(here, expert[:, None], chosen)
        shares = tl.where(here, tl.exp(value - largest)[:, None], shares)
        left = tl.where(experts[None, :] == expert[:, None], float("-inf"), left)
    shares = shares / tl.sum(shares, axis=1)[:, None]
    stored = (row < tokens)[:, None] & (ranks < TOP_K)[None, :]
    places = row.to(tl.int64)[:, None] * TOP_K + ranks[None, :]
    tl.store(weights + places, shares.to(weights.dtype.element_ty), mask=stored)
    tl.store(ids + places, chosen.to(tl.int64), mask=stored)


def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=logits.dtype, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    block = power_of_two(experts)
    rows = max(1, 2048 // block)
    arguments = {
        "logits": logits,
        "weights": weights,
        "ids": ids,
        "tokens": tokens,
        "stride": logits.stride(0),
        "EXPERTS": experts,
        "BLOCK": block,
        "TOP_K": top_k,
        "BLOCK_K": power_of_two(top_k),
        "ROWS": rows,
    }
    launch(_route_kernel, (triton.cdiv(tokens, rows),), arguments)
    return weights, ids


@triton.jit
def _gate_up_kernel(
    x,
    order,
    tile_expert,
    tile_first,
    ends,
    gate_up,
    out,
    x_stride,
    expert_stride,
    row_stride,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute silu(x gate^T) * (x up^T) for up to ROWS sorted (token, expert) pairs of one
    expert."""
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert >= 0:
        pairs, real, origin = tile_pairs(order, tile_first, ends, tile, expert, ROWS)
        token = origin // TOP_K
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        x_rows = token.to(tl.int64) * x_stride
        weight = gate_up + expert * expert_stride + columns.to(tl.int64) * row_stride
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, HIDDEN, DEPTH):
            at = start + depth
            inside = (at < HIDDEN)[:, None] & (columns < WIDTH)[None, :]
            mask = real[:, None] & (at < HIDDEN)[None, :]
            rows = tl.load(x + x_rows[:, None] + at[None, :], mask=mask, other=0.0).to(DOT)
            part = tl.load(weight[None, :] + at[:, None], mask=inside, other=0.0).to(DOT)
            gate = tl.dot(rows, part, gate, input_precision=PRECISION)
            below = weight[None, :] + WIDTH * row_stride
            part = tl.load(below + at[:, None], mask=inside, other=0.0).to(DOT)
            up = tl.dot(rows, part, up, input_precision=PRECISION)
        store_gated(out, gate, up, pairs, real, columns, WIDTH)


@triton.jit
def _down_kernel(
    x,
    order,
    weights,
    tile_expert,
    tile_first,
    ends,
    down,
    out,
    expert_stride,
    row_stride,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute weight * x down^T, stored at the pair's place in token order."""
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert >= 0:
        pairs, real, origin = tile_pairs(order, tile_first, ends, tile, expert, ROWS)
        pair = origin.to(tl.int64)
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        x_rows = pairs.to(tl.int64) * WIDTH
        weight = down + expert * expert_stride + columns.to(tl.int64) * row_stride
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, WIDTH, DEPTH):
            at = start + depth
            inside = (at < WIDTH)[:, None] & (columns < HIDDEN)[None, :]
            mask = real[:, None] & (at < WIDTH)[None, :]
            rows = tl.load(x + x_rows[:, None] + at[None, :], mask=mask, other=0.0).to(DOT)
            part = tl.load(weight[None, :] + at[:, None], mask=inside, other=0.0).to(DOT)
            total = tl.dot(rows, part, total, input_precision=PRECISION)
        store_weighted(out, weights, total, pair, real, columns, HIDDEN)


@triton.jit
def _sum_kernel(
    parts,
    shared,
    gate,
    residual,
    out,
    shared_stride,
    gate_stride,
    residual_stride,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    SHARED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Sum a token's experts in the order of its router: no atomics, always the same bits.

    What is beside them is added as by operations of their own, which round to the dtype of out.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < HIDDEN
    dtype = out.dtype.element_ty
    total = tl.zeros((TILE,), tl.float32)
    for rank in range(TOP_K):
        places = (token * TOP_K + rank) * HIDDEN + columns
        total += tl.load(parts + places, mask=inside, other=0.0).to(tl.float32)
    if SHARED:
        logit = tl.load(gate + token * gate_stride).to(tl.float32)
        own = tl.load(shared + token * shared_stride + columns, mask=inside, other=0.0)
        own = (own.to(tl.float32) / (1.0 + tl.exp(-logit))).to(dtype)
        total = total.to(dtype).to(tl.float32) + own.to(tl.float32)
    if RESIDUAL:
        before = tl.load(residual + token * residual_stride + columns, mask=inside, other=0.0)
        total = before.to(tl.float32) + total.to(dtype).to(tl.float32)
    tl.store(out + token * HIDDEN + columns, total.to(dtype), mask=inside)


def summed(parts: torch.Tensor, x: torch.Tensor, top_k: int, beside: Beside | None) -> torch.Tensor:
    tokens, hidden = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    residual, shared, gate = beside or (None, None, None)
    block = min(1024, power_of_two(hidden))
    arguments = {
        "parts": parts,
        # Any pointer takes the place of what there is not; it is never read.
        "shared": parts if shared is None else shared,
        "gate": parts if gate is None else gate,
        "residual": parts if residual is None else residual,
        "out": out,
        "shared_stride": 0 if shared is None else shared.stride(0),
        "gate_stride": 0 if gate is None else gate.stride(0),
        "residual_stride": 0 if residual is None else residual.stride(0),
        "HIDDEN": hidden,
        "TOP_K": top_k,
        "TILE": block,
        "SHARED": shared is not None,
        "RESIDUAL": residual is not None,
    }
    launch(_sum_kernel, (tokens, triton.cdiv(hidden, block)), arguments)
    return out


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor | Stored,
    down: torch.Tensor | Stored,
    *,
    deterministic: bool,
    beside: Beside | None = None,
) -> torch.Tensor:
    """Round parts to the dtype of x, then sum them in float32 in the router's order."""
    tokens, hidden = x.shape
    experts, width = sizes_of(gate_up, down, hidden)
    top_k, coded = ids.shape[1], isinstance(gate_up, Stored)
    tile = tile_of(x.dtype, tokens * top_k, experts, deterministic, coded)
    plan = align(ids, experts, tile["ROWS"])
    shared: dict[str, Any] = {
        **plan,
        "HIDDEN": hidden,
        "WIDTH": width,
        "DOT": dot_dtype(x.dtype),
        "PRECISION": current_target().dot_precision,
        "ROWS": tile["ROWS"],
        "COLUMNS": tile["COLUMNS"],
    }
    tiles = plan["tile_expert"].shape[0]
    inner = torch.empty(tokens * top_k, width, dtype=x.dtype, device=x.device)
    arguments = {
        **shared,
        **_weight("gate_up", gate_up, x, tile),
        "x": x,
        "out": inner,
        "x_stride": x.stride(0),
        "TOP_K": top_k,
    }
    stages = 1 if x.dtype == torch.float32 else 3
    grid = (triton.cdiv(width, tile["COLUMNS"]), tiles)
    kernel = gate_up_codes_kernel if coded else _gate_up_kernel
    launch(kernel, grid, arguments, num_warps=4, num_stages=stages)
    parts = torch.empty(tokens * top_k, hidden, dtype=x.dtype, device=x.device)
    arguments = {
        **shared,
        **_weight("down", down, x, tile),
        "x": inner,
        "weights": weights.contiguous(),
        "out": parts,
    }
    grid = (triton.cdiv(hidden, tile["COLUMNS"]), tiles)
    kernel = down_codes_kernel if coded else _down_kernel
    launch(kernel, grid, arguments, num_warps=4, num_stages=stages)
    return summed(parts, x, top_k, beside)


def _weight(
    name: str, weight: torch.Tensor | Stored, x: torch.Tensor, tile: dict[str, int]
) -> dict[str, Any]:
    """Return all experts' weights as arguments of their kernel."""
    if isinstance(weight, torch.Tensor):
        strides = {"expert_stride": weight.stride(0), "row_stride": weight.stride(1)}
        return {name: weight, **strides, "DEPTH": tile["DEPTH"]}
    return code_arguments(weight, x, current_target())


def sizes_of(
    gate_up: torch.Tensor | Stored, down: torch.Tensor | Stored, hidden: int
) -> tuple[int, int]:
    """Return the number of experts and their width.

    Raises:
        KernelArgumentError: weights packed for a CPU.
    """
    if isinstance(gate_up, Stored) and isinstance(down, Stored):
        return down.codes.shape[0] // hidden, down.depth
    if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        return gate_up.shape[0], down.shape[2]
    raise KernelArgumentError("gate_up", "packed weights are for the CPU path")


def tile_of(
    dtype: torch.dtype, pairs: int, experts: int, deterministic: bool, coded: bool
) -> dict[str, int]:
    """Choose tile sizes; `deterministic` takes one shape whatever the step holds.

    Rows are few where experts have few tokens each: a weight tile is read once per row tile either
    way.
    """
    columns, depth = (32, 32) if dtype == torch.float32 else (64, 64)
    few = 32 if pairs > 8 * experts else 16
    rows = 64 if deterministic or pairs > 32 * experts else few
    if coded and rows > 16:
        columns = 32  # The conversion of codes to values takes registers too.
    return {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth}
