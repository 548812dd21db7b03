"""Routed experts with adapters on a GPU: the products of `triton.py`, and adapters' additions.

Pairs are in tiles of one expert, as without adapters, so that a weight is read once for all of
them. Sums have the order and the tiles of the base's kernels: a pair without an adapter has the
bits of the base.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.linear.codes_triton import code_arguments, grouped_product
from vlm_serve.kernels.linear.low_rank_factors import ExpertSites
from vlm_serve.kernels.linear.stored_codes import Stored
from vlm_serve.kernels.moe import triton as base
from vlm_serve.kernels.moe.align_triton import align
from vlm_serve.kernels.moe.beside import Beside
from vlm_serve.kernels.moe.pair_changes_triton import pair_changes, with_part
from vlm_serve.kernels.moe.pairs_triton import store_gated, store_weighted, tile_pairs
from vlm_serve.kernels.triton_support import current_target, dot_dtype, launch


@triton.jit
def _product(
    x_rows,
    weight,
    columns,
    inside,
    SIZE: tl.constexpr,
    CODED: tl.constexpr,
    LAYOUT: tl.constexpr,
    DEPTH: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply rows by columns of a weight. See `grouped_product`; A plain weight
    takes the place of codes, and `code_stride` is that of its rows."""
    if CODED:
        total = grouped_product(
            x_rows, weight, columns, inside, SIZE, LAYOUT, DEPTH, DOT, PRECISION
        )
    else:
        x, x_places, real = x_rows
        own = weight[0] + columns * weight[4]
        total = tl.zeros((real.shape[0], columns.shape[0]), tl.float32)
        for start in range(0, SIZE, DEPTH):
            at = start + tl.arange(0, DEPTH)
            known = at < SIZE
            wanted = real[:, None] & known[None, :]
            rows = tl.load(x + x_places[:, None] + at[None, :], mask=wanted, other=0.0).to(DOT)
            wanted = known[:, None] & inside[None, :]
            part = tl.load(own[None, :] + at[:, None], mask=wanted, other=0.0).to(DOT)
            total = tl.dot(rows, part, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["count", "slots"])
def _changed_gate_up_kernel(
    x,
    order,
    tile_expert,
    tile_first,
    ends,
    adapters,
    records,
    u,
    codes,
    scales,
    zeros,
    factors,
    out,
    count,
    slots,
    width,
    x_stride,
    record_stride,
    code_stride,
    scale_stride,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    LOW_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CODED: tl.constexpr,
    LAYOUT: tl.constexpr,
    DEPTH: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute silu(gate) * up of a tile's pairs, with changed products."""
    number = tl.program_id(1)
    expert = tl.load(tile_expert + number).to(tl.int64)
    if expert >= 0:
        pairs, real, origin = tile_pairs(order, tile_first, ends, number, expert, ROWS)
        token = origin // TOP_K
        owner = tl.load(adapters + token, mask=real, other=-1)
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < WIDTH
        rows = (x, token.to(tl.int64) * x_stride, real)
        weight = (codes, scales, zeros, factors, code_stride, scale_stride)
        first = expert * (2 * WIDTH) + columns
        gate = _product(rows, weight, first, inside, HIDDEN, CODED, LAYOUT, DEPTH, DOT, PRECISION)
        first += WIDTH
        up = _product(rows, weight, first, inside, HIDDEN, CODED, LAYOUT, DEPTH, DOT, PRECISION)
        tile = (expert, pairs, owner)
        changes = (u, records, count, slots, width, record_stride)
        gate = with_part(gate, tile, changes, columns, 0, WIDTH, LOW_RANK, PRECISION)
        up = with_part(up, tile, changes, columns, 1, WIDTH, LOW_RANK, PRECISION)
        store_gated(out, gate, up, pairs, real, columns, WIDTH)


@triton.jit(do_not_specialize=["count", "slots"])
def _changed_down_kernel(
    x,
    order,
    weights,
    tile_expert,
    tile_first,
    ends,
    adapters,
    records,
    u,
    codes,
    scales,
    zeros,
    factors,
    out,
    count,
    slots,
    width,
    record_stride,
    code_stride,
    scale_stride,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    LOW_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CODED: tl.constexpr,
    LAYOUT: tl.constexpr,
    DEPTH: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute weight * down of a tile's pairs, with changed products, at their places in token
    order."""
    number = tl.program_id(1)
    expert = tl.load(tile_expert + number).to(tl.int64)
    if expert >= 0:
        pairs, real, origin = tile_pairs(order, tile_first, ends, number, expert, ROWS)
        owner = tl.load(adapters + origin // TOP_K, mask=real, other=-1)
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < HIDDEN
        rows = (x, pairs.to(tl.int64) * WIDTH, real)
        weight = (codes, scales, zeros, factors, code_stride, scale_stride)
        first = expert * HIDDEN + columns
        total = _product(rows, weight, first, inside, WIDTH, CODED, LAYOUT, DEPTH, DOT, PRECISION)
        tile = (expert, pairs, owner)
        changes = (u, records, count, slots, width, record_stride)
        total = with_part(total, tile, changes, columns, 0, HIDDEN, LOW_RANK, PRECISION)
        store_weighted(out, weights, total, origin.to(tl.int64), real, columns, HIDDEN)


def changed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor | Stored,
    down: torch.Tensor | Stored,
    sites: ExpertSites,
    *,
    deterministic: bool,
    beside: Beside | None = None,
) -> torch.Tensor:
    """Compute as `routed_experts`, with changes before the activation and before the weights."""
    (tokens, hidden), top_k = x.shape, ids.shape[1]
    pairs, coded = tokens * top_k, isinstance(gate_up, Stored)
    experts, width = base.sizes_of(gate_up, down, hidden)
    tile = base.tile_of(x.dtype, pairs, experts, deterministic, coded)
    plan = align(ids, experts, tile["ROWS"])
    shared: dict[str, Any] = {
        **plan,
        "count": pairs,
        "TOP_K": top_k,
        "HIDDEN": hidden,
        "WIDTH": width,
        "DOT": dot_dtype(x.dtype),
        "PRECISION": current_target().dot_precision,
        "ROWS": tile["ROWS"],
        "COLUMNS": tile["COLUMNS"],
    }
    tiles, stages = plan["tile_expert"].shape[0], 1 if x.dtype == torch.float32 else 3
    inner = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    arguments = {
        **shared,
        **pair_changes(x, sites.gate_up, plan, tile["ROWS"], top_k, by_pair=False),
        **_weight(gate_up, x, tile),
        "x": x,
        "out": inner,
        "x_stride": x.stride(0),
    }
    grid = (triton.cdiv(width, tile["COLUMNS"]), tiles)
    launch(_changed_gate_up_kernel, grid, arguments, num_warps=4, num_stages=stages)
    parts = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    arguments = {
        **shared,
        **pair_changes(inner, sites.down, plan, tile["ROWS"], top_k, by_pair=True),
        **_weight(down, x, tile),
        "x": inner,
        "weights": weights.contiguous(),
        "out": parts,
    }
    grid = (triton.cdiv(hidden, tile["COLUMNS"]), tiles)
    launch(_changed_down_kernel, grid, arguments, num_warps=4, num_stages=stages)
    return base.summed(parts, x, top_k, beside)


def _weight(weight: torch.Tensor | Stored, x: torch.Tensor, tile: dict[str, int]) -> dict[str, Any]:
    """Return all experts' weights as arguments of their kernel."""
    if isinstance(weight, torch.Tensor):
        rows = weight.flatten(0, 1)
        none = dict.fromkeys(("scales", "zeros", "factors"), rows)
        strides = {"code_stride": rows.stride(0), "scale_stride": 0}
        return {
            "codes": rows,
            **none,
            **strides,
            "DEPTH": tile["DEPTH"],
            "CODED": False,
            "LAYOUT": (0, 0, 0, 0),
        }
    own = code_arguments(weight, x, current_target())
    layout = tuple(own.pop(name) for name in ("GROUP", "FORM", "ZEROS", "SCALES"))
    return {"DEPTH": own.pop("STEP"), **own, "CODED": True, "LAYOUT": layout}
