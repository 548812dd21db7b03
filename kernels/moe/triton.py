"""Router and routed experts on a GPU: two grouped products over tokens sorted by expert, plain or
quantised, with adapters or not.

Pairs are in tiles of one expert, with adapters too, so that a weight is read once for all of them.
Sums have one order and one shape of tiles: a pair without an adapter has the bits of the base.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear.codes_triton import code_arguments, grouped_product
from vlm_serve.kernels.linear.low_rank_factors import ExpertSites
from vlm_serve.kernels.linear.stored_codes import Stored
from vlm_serve.kernels.moe.align_triton import align, store_inner, store_weighted, tile_pairs
from vlm_serve.kernels.moe.pair_changes_triton import pair_changes, with_part
from vlm_serve.kernels.moe.reference import Addends, Sigmoids, has_gates
from vlm_serve.kernels.triton_support import current_target, launch, power_of_two
from vlm_serve.kernels.triton_views import constants, dots
from vlm_serve.kernels.triton_views import rows as rows_of


class Plain(NamedTuple):
    """Weights of all experts, not quantised: a pointer, and the strides of experts and of rows."""

    at: torch.Tensor
    expert: int
    row: int


class ExpertSizes(NamedTuple):
    """Constants: experts of a token, widths, and the tile of a program."""

    top_k: int
    hidden: int
    width: int
    rows: int
    columns: int
    depth: int


@triton.jit
def _both_products(
    x, x_rows, real, weight, expert, columns, SIZES: tl.constexpr, DOT: tl.constexpr
):
    """Multiply rows by a gate's columns of plain weights, and by those of `up` behind them."""
    HIDDEN: tl.constexpr = SIZES.hidden
    depth = tl.arange(0, SIZES.depth)
    own = weight.at + expert * weight.expert + columns.to(tl.int64) * weight.row
    gate = tl.zeros((SIZES.rows, SIZES.columns), tl.float32)
    up = tl.zeros((SIZES.rows, SIZES.columns), tl.float32)
    for start in range(0, HIDDEN, SIZES.depth):
        at = start + depth
        inside = (at < HIDDEN)[:, None] & (columns < SIZES.width)[None, :]
        mask = real[:, None] & (at < HIDDEN)[None, :]
        rows = tl.load(x.at + x_rows[:, None] + at[None, :], mask=mask, other=0.0).to(DOT.dtype)
        part = tl.load(own[None, :] + at[:, None], mask=inside, other=0.0).to(DOT.dtype)
        gate = tl.dot(rows, part, gate, input_precision=DOT.precision)
        below = own[None, :] + SIZES.width * weight.row
        part = tl.load(below + at[:, None], mask=inside, other=0.0).to(DOT.dtype)
        up = tl.dot(rows, part, up, input_precision=DOT.precision)
    return gate, up


@triton.jit
def _own_product(x, x_rows, real, weight, expert, columns, SIZES: tl.constexpr, DOT: tl.constexpr):
    """Multiply rows of sorted pairs by columns of an expert's plain weight."""
    WIDTH: tl.constexpr = SIZES.width
    depth = tl.arange(0, SIZES.depth)
    own = weight.at + expert * weight.expert + columns.to(tl.int64) * weight.row
    total = tl.zeros((SIZES.rows, SIZES.columns), tl.float32)
    for start in range(0, WIDTH, SIZES.depth):
        at = start + depth
        inside = (at < WIDTH)[:, None] & (columns < SIZES.hidden)[None, :]
        mask = real[:, None] & (at < WIDTH)[None, :]
        rows = tl.load(x.at + x_rows[:, None] + at[None, :], mask=mask, other=0.0).to(DOT.dtype)
        part = tl.load(own[None, :] + at[:, None], mask=inside, other=0.0).to(DOT.dtype)
        total = tl.dot(rows, part, total, input_precision=DOT.precision)
    return total


@triton.jit
def _product(
    x_rows,
    weight,
    columns,
    inside,
    SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
    LAYOUT: tl.constexpr,
    DOT: tl.constexpr,
):
    """Multiply rows by columns of all experts' weights; see `grouped_product`."""
    if LAYOUT is not None:
        total = grouped_product(x_rows, weight, columns, inside, SIZE, LAYOUT, DOT)
    else:
        x, x_places, real = x_rows
        own = weight.at + columns * weight.row
        total = tl.zeros((real.shape[0], columns.shape[0]), tl.float32)
        for start in range(0, SIZE, DEPTH):
            at = start + tl.arange(0, DEPTH)
            known = at < SIZE
            wanted = real[:, None] & known[None, :]
            rows = tl.load(x + x_places[:, None] + at[None, :], mask=wanted, other=0.0)
            rows = rows.to(DOT.dtype)
            wanted = known[:, None] & inside[None, :]
            part = tl.load(own[None, :] + at[:, None], mask=wanted, other=0.0).to(DOT.dtype)
            total = tl.dot(rows, part, total, input_precision=DOT.precision)
    return total


# The numbers of pairs and adapters differ between steps: specialising on them would recompile while
# serving.
@triton.jit(do_not_specialize=["count", "slots"])
def gate_up_kernel(
    x,
    weight,
    out,
    plan,
    changes,
    count,
    slots,
    LAYOUT: tl.constexpr,
    SIZES: tl.constexpr,
    DOT: tl.constexpr,
    GATED: tl.constexpr,
):
    """Compute silu(x gate^T) * (x up^T) for a tile of sorted (token, expert) pairs of one expert;
    max(x up^T, 0) squared if not GATED.

    LAYOUT: of codes; None: the weight is `Plain`. changes: of adapters, `count` pairs and `slots`
    adapters; None: there are none.
    """
    WIDTH: tl.constexpr = SIZES.width
    tile = tl.program_id(1)
    expert = tl.load(plan.tile_expert + tile).to(tl.int64)
    if expert >= 0:
        pairs, real, origin = tile_pairs(plan, tile, expert, SIZES.rows)
        token = origin // SIZES.top_k
        if changes is not None:
            owner = tl.load(changes.adapters + token, mask=real, other=-1)
        columns = tl.program_id(0) * SIZES.columns + tl.arange(0, SIZES.columns)
        if GATED and LAYOUT is None and changes is None:
            x_rows = token.to(tl.int64) * x.stride
            gate, up = _both_products(x, x_rows, real, weight, expert, columns, SIZES, DOT)
        else:
            inside = columns < WIDTH
            rows = (x.at, token.to(tl.int64) * x.stride, real)
            first = expert * ((2 if GATED else 1) * WIDTH) + columns
            gate = _product(rows, weight, first, inside, SIZES.hidden, SIZES.depth, LAYOUT, DOT)
            if GATED:
                first += WIDTH
                up = _product(rows, weight, first, inside, SIZES.hidden, SIZES.depth, LAYOUT, DOT)
        if changes is not None:
            members, counts = (expert, pairs, owner), (count, slots)
            gate = with_part(gate, members, changes, counts, columns, 0, WIDTH, DOT)
            if GATED:
                up = with_part(up, members, changes, counts, columns, 1, WIDTH, DOT)
        result = gate * tl.sigmoid(gate) * up if GATED else tl.where(gate < 0.0, 0.0, gate * gate)
        store_inner(out, result, pairs, real, columns, WIDTH)


@triton.jit(do_not_specialize=["count", "slots"])
def down_kernel(
    x,
    weight,
    weights,
    out,
    plan,
    changes,
    count,
    slots,
    LAYOUT: tl.constexpr,
    SIZES: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute weight * x down^T, stored at the pair's place in token order; see
    `gate_up_kernel`."""
    HIDDEN: tl.constexpr = SIZES.hidden
    tile = tl.program_id(1)
    expert = tl.load(plan.tile_expert + tile).to(tl.int64)
    if expert >= 0:
        pairs, real, origin = tile_pairs(plan, tile, expert, SIZES.rows)
        if changes is None:
            pair = origin.to(tl.int64)
        else:
            owner = tl.load(changes.adapters + origin // SIZES.top_k, mask=real, other=-1)
        columns = tl.program_id(0) * SIZES.columns + tl.arange(0, SIZES.columns)
        if LAYOUT is None and changes is None:
            x_rows = pairs.to(tl.int64) * SIZES.width
            total = _own_product(x, x_rows, real, weight, expert, columns, SIZES, DOT)
        else:
            inside = columns < HIDDEN
            rows = (x.at, pairs.to(tl.int64) * SIZES.width, real)
            first = expert * HIDDEN + columns
            total = _product(rows, weight, first, inside, SIZES.width, SIZES.depth, LAYOUT, DOT)
        if changes is not None:
            members, counts = (expert, pairs, owner), (count, slots)
            total = with_part(total, members, changes, counts, columns, 0, HIDDEN, DOT)
            pair = origin.to(tl.int64)
        store_weighted(out, weights, total, pair, real, columns, HIDDEN)


# The number of tokens differs between steps: specialising on it would recompile while serving.
@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    logits,
    bias,
    weights,
    ids,
    tokens,
    stride,
    scale,
    floor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOIDS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, BLOCK)
    inside = (row < tokens)[:, None] & (experts < EXPERTS)[None, :]
    places = row.to(tl.int64)[:, None] * stride + experts[None, :]
    left = tl.load(logits + places, mask=inside, other=float("-inf")).to(tl.float32)
    # Rows past the end stay finite; they are not stored.
    left = tl.where((row < tokens)[:, None], left, 0.0)
    if SIGMOIDS:
        own = tl.sigmoid(left)
        left = own
        if bias is not None:
            left += tl.load(bias + experts, mask=experts < EXPERTS, other=0.0)[None, :]
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
        if SIGMOIDS:
            share = tl.sum(tl.where(experts[None, :] == expert[:, None], own, 0.0), axis=1)
        else:
            share = tl.exp(value - largest)
        shares = tl.where(here, share[:, None], shares)
        left = tl.where(experts[None, :] == expert[:, None], float("-inf"), left)
    total = tl.sum(shares, axis=1)[:, None]
    shares = shares / (total + floor) * scale if SIGMOIDS else shares / total
    stored = (row < tokens)[:, None] & (ranks < TOP_K)[None, :]
    places = row.to(tl.int64)[:, None] * TOP_K + ranks[None, :]
    tl.store(weights + places, shares.to(weights.dtype.element_ty), mask=stored)
    tl.store(ids + places, chosen.to(tl.int64), mask=stored)


def route(
    logits: torch.Tensor, top_k: int, sigmoids: Sigmoids | None
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=logits.dtype, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    block = power_of_two(experts)
    rows = max(1, 2048 // block)
    arguments = {
        "logits": logits,
        "bias": None if sigmoids is None else sigmoids.bias,
        "weights": weights,
        "ids": ids,
        "tokens": tokens,
        "stride": logits.stride(0),
        "scale": 1.0 if sigmoids is None else sigmoids.scale,
        "floor": 0.0 if sigmoids is None else sigmoids.floor,
        "EXPERTS": experts,
        "BLOCK": block,
        "TOP_K": top_k,
        "BLOCK_K": power_of_two(top_k),
        "ROWS": rows,
        "SIGMOIDS": sigmoids is not None,
    }
    launch(_route_kernel, (triton.cdiv(tokens, rows),), arguments)
    return weights, ids


@triton.jit
def _sum_kernel(
    parts,
    shared,
    gate,
    residual,
    out,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
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
    if shared is not None:
        logit = tl.load(gate.at + token * gate.stride).to(tl.float32)
        own = tl.load(shared.at + token * shared.stride + columns, mask=inside, other=0.0)
        own = (own.to(tl.float32) / (1.0 + tl.exp(-logit))).to(dtype)
        total = total.to(dtype).to(tl.float32) + own.to(tl.float32)
    if residual is not None:
        before = tl.load(residual.at + token * residual.stride + columns, mask=inside, other=0.0)
        total = before.to(tl.float32) + total.to(dtype).to(tl.float32)
    tl.store(out + token * HIDDEN + columns, total.to(dtype), mask=inside)


def _summed(
    parts: torch.Tensor, x: torch.Tensor, top_k: int, addends: Addends | None
) -> torch.Tensor:
    tokens, hidden = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    residual, shared, gate = (
        addend if addend is None else rows_of(addend) for addend in addends or (None,) * 3
    )
    block = min(1024, power_of_two(hidden))
    arguments = {
        "parts": parts,
        "shared": shared,
        "gate": gate,
        "residual": residual,
        "out": out,
        "HIDDEN": hidden,
        "TOP_K": top_k,
        "TILE": block,
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
    addends: Addends | None = None,
    sites: ExpertSites | None = None,
) -> torch.Tensor:
    """Round parts to the dtype of x, then sum them in float32 in the router's order. Changes at
    `sites` come before the activation and before the weights."""
    (tokens, hidden), top_k = x.shape, ids.shape[1]
    pairs, experts = tokens * top_k, (gate_up, down)
    count, width = _sizes_of(*experts, hidden)
    coded, gated = isinstance(gate_up, Stored), has_gates(gate_up, down)
    rows, columns, depth = _tile_of(x.dtype, pairs, count, deterministic, coded)
    plan = align(ids, count, rows)
    shared = {
        "plan": plan,
        "count": pairs,
        "slots": 0 if sites is None else len(sites.gate_up.records),
        "SIZES": constants(ExpertSizes, top_k, hidden, width, rows, columns, depth),
        "DOT": dots(x.dtype),
    }
    stages, tiles = 1 if x.dtype == torch.float32 else 3, len(plan.tile_expert)

    def product(kernel: Any, operands: dict[str, Any], place: int, size: int) -> torch.Tensor:
        out = torch.empty(pairs, size, dtype=x.dtype, device=x.device)
        changes = None
        if sites is not None:
            changes = pair_changes(
                operands["x"].at, sites[place], plan, rows, top_k, by_pair=place > 0
            )
        arguments = {
            **shared,
            **_weight(experts[place], x, flat=sites is not None or not (gated or place)),
            **operands,
            "out": out,
            "changes": changes,
        }
        launch(kernel, (triton.cdiv(size, columns), tiles), arguments, num_stages=stages)
        return out

    inner = product(gate_up_kernel, {"x": rows_of(x), "GATED": gated}, 0, width)
    weighted = {"x": rows_of(inner), "weights": weights.contiguous()}
    return _summed(product(down_kernel, weighted, 1, hidden), x, top_k, addends)


def _weight(weight: torch.Tensor | Stored, x: torch.Tensor, *, flat: bool) -> dict[str, Any]:
    """Return all experts' weights as arguments of their kernel; `flat`: as rows of one weight."""
    if isinstance(weight, Stored):
        return code_arguments(weight, x, current_target())
    if flat:
        return {"weight": Plain(weight.flatten(0, 1), 0, weight.stride(1)), "LAYOUT": None}
    return {"weight": Plain(weight, *weight.stride()[:2]), "LAYOUT": None}


def _sizes_of(
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


def _tile_of(
    dtype: torch.dtype, pairs: int, experts: int, deterministic: bool, coded: bool
) -> tuple[int, int, int]:
    """Choose a tile: rows, columns, depth; `deterministic` takes one shape whatever the step holds.

    Rows are few where experts have few tokens each: a weight tile is read once per row tile either
    way.
    """
    columns, depth = (32, 32) if dtype == torch.float32 else (64, 64)
    few = 32 if pairs > 8 * experts else 16
    rows = 64 if deterministic or pairs > 32 * experts else few
    if coded and rows > 16:
        columns = 32  # The conversion of codes to values takes registers too.
    return rows, columns, depth
