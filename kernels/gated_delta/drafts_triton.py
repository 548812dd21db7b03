"""Gated delta rule over drafted tokens on a GPU.

As in the decode step, a tile of the state stays in registers, from the row through all tokens of a
slice. Updates of earlier tokens are folded in while the tile is read. New updates go to separate
memory first: programs of other tiles may still have to read the old ones.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl

from vlm_serve.kernels.gated_delta.step_triton import STEP_COLUMNS, step, step_arguments
from vlm_serve.kernels.gated_delta.tokens import Tokens
from vlm_serve.kernels.metadata import Updates, VerifyMeta
from vlm_serve.kernels.triton_support import launch, verify_tables

KEPT_TILE = 1024
"""Values of an update that a program keeps."""


@triton.jit(do_not_specialize=["room"])
def _verify_kernel(
    q,
    k,
    v,
    g,
    beta,
    state,
    out,
    old_keys,
    old_changes,
    old_decays,
    new_keys,
    new_changes,
    new_decays,
    table,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    g_stride,
    beta_stride,
    state_row_stride,
    key_stride,
    change_stride,
    decay_stride,
    scale,
    room,
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head = tl.program_id(1)
    key_head = head // RATIO
    dims = tl.arange(0, BLOCK_KEY)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = dims < KEY_DIM
    inside_columns = columns < VALUE_DIM
    tile_inside = inside[:, None] & inside_columns[None, :]
    table += tl.program_id(2) * 5
    row = tl.load(table).to(tl.int64)
    first = tl.load(table + 1).to(tl.int64)
    folded = tl.load(table + 2)
    state += row * state_row_stride + head * KEY_DIM * VALUE_DIM
    tile = state + dims[:, None] * VALUE_DIM + columns[None, :]

    current = tl.load(tile, mask=tile_inside, other=0.0).to(tl.float32)
    for place in range(0, folded):
        entry = first + place
        held_key = tl.load(
            old_keys + entry * key_stride + key_head * KEY_DIM + dims, mask=inside, other=0.0
        )
        held_change = tl.load(
            old_changes + entry * change_stride + head * VALUE_DIM + columns,
            mask=inside_columns,
            other=0.0,
        )
        current *= tl.load(old_decays + entry * decay_stride + head)
        current += held_key[:, None] * held_change[None, :]
        current = current.to(state.dtype.element_ty).to(tl.float32)
    if folded > 0:
        tl.store(tile, current.to(state.dtype.element_ty), mask=tile_inside)
    begin = tl.load(table + 3).to(tl.int64)
    for place in range(0, tl.load(table + 4)):
        token = begin + place
        q_places = token * q_token_stride + key_head * q_head_stride + dims
        k_places = token * k_token_stride + key_head * k_head_stride + dims
        v_places = token * v_token_stride + head * v_head_stride + columns
        current, result, key, change, decay = step(
            current,
            tl.load(q + q_places, mask=inside, other=0.0).to(tl.float32),
            tl.load(k + k_places, mask=inside, other=0.0).to(tl.float32),
            tl.load(v + v_places, mask=inside_columns, other=0.0).to(tl.float32),
            tl.load(g + token * g_stride + head),
            tl.load(beta + token * beta_stride + head).to(tl.float32),
            scale,
        )
        current = current.to(state.dtype.element_ty).to(tl.float32)
        own = (token * HEADS + head) * VALUE_DIM + columns
        tl.store(out + own, result.to(out.dtype.element_ty), mask=inside_columns)
        tl.store(new_changes + own, change, mask=inside_columns)
        if tl.program_id(0) == 0:
            tl.store(new_decays + token * HEADS + head, decay)
            if head % RATIO == 0:
                shared = (token * (HEADS // RATIO) + key_head) * KEY_DIM + dims
                tl.store(new_keys + shared, key, mask=inside)
    # Padding of a slice with a fixed place: later layers compute on it, so it must be finite.
    for place in range(tl.load(table + 4), room):
        own = ((begin + place) * HEADS + head) * VALUE_DIM + columns
        tl.store(out + own, tl.zeros((COLUMNS,), out.dtype.element_ty), mask=inside_columns)


@triton.jit
def _keep_kernel(
    new_keys,
    new_changes,
    new_decays,
    keys,
    changes,
    decays,
    entries,
    key_stride,
    change_stride,
    decay_stride,
    KEYS: tl.constexpr,
    CHANGES: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Keep a token's update in its entry; padding has none."""
    token = tl.program_id(0).to(tl.int64)
    entry = tl.load(entries + token).to(tl.int64)
    if entry >= 0:
        places = tl.program_id(1) * TILE + tl.arange(0, TILE)
        kept = tl.load(new_keys + token * KEYS + places, mask=places < KEYS, other=0.0)
        tl.store(keys + entry * key_stride + places, kept, mask=places < KEYS)
        kept = tl.load(new_changes + token * CHANGES + places, mask=places < CHANGES, other=0.0)
        tl.store(changes + entry * change_stride + places, kept, mask=places < CHANGES)
        kept = tl.load(new_decays + token * HEADS + places, mask=places < HEADS, other=0.0)
        tl.store(decays + entry * decay_stride + places, kept, mask=places < HEADS)


def verify_gated_delta(
    tokens: Tokens, state: torch.Tensor, updates: Updates, meta: VerifyMeta
) -> torch.Tensor:
    k, v = tokens.k, tokens.v
    tables = verify_tables(meta, v.device)
    made = [
        torch.empty(size, device=v.device, dtype=torch.float32)
        for size in (k.shape, v.shape, v.shape[:2])
    ]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    # In a captured step all slices have as much room, whatever tokens they have.
    lengths = {end - begin for begin, end in pairwise(meta.cu_seqlens)}
    room = lengths.pop() if len(lengths) == 1 else 0
    _launch(tokens, state, out, updates, made, tables["slices"], room)
    _keep(updates, made, tables["entries"])
    return out


def _keep(updates: Updates, made: Sequence[torch.Tensor], entries: torch.Tensor) -> None:
    """Copy the tokens' updates to their entries."""
    keys, changes, decays = made
    sizes = keys[0].numel(), changes[0].numel(), decays.shape[1]
    arguments = {
        "new_keys": keys,
        "new_changes": changes,
        "new_decays": decays,
        "keys": updates.keys,
        "changes": updates.changes,
        "decays": updates.decays,
        "entries": entries,
        "key_stride": updates.keys.stride(0),
        "change_stride": updates.changes.stride(0),
        "decay_stride": updates.decays.stride(0),
        **dict(zip(("KEYS", "CHANGES", "HEADS"), sizes, strict=True)),
        "TILE": KEPT_TILE,
    }
    launch(_keep_kernel, (len(entries), triton.cdiv(max(sizes), KEPT_TILE)), arguments)


def fold_gated_delta(
    state: torch.Tensor, updates: Updates, folds: Sequence[tuple[int, int, int]]
) -> None:
    """Run the verify kernel on slices of no tokens, which only folds."""
    device = state.device
    table = torch.tensor([(*fold, 0, 0) for fold in folds], dtype=torch.int32, device=device)
    keys, values = updates.keys[:0], updates.changes[:0]
    gates = updates.decays[:0]
    made = [keys, values, gates]
    none = Tokens(keys, keys, values, gates, gates)
    _launch(none, state, values, updates, made, table, 0)


def _launch(tokens, state, out, updates, made, table, room) -> None:
    heads, value_dim = tokens.v.shape[1:]
    arguments = {
        **step_arguments(tokens, state, out),
        "old_keys": updates.keys,
        "old_changes": updates.changes,
        "old_decays": updates.decays,
        "new_keys": made[0],
        "new_changes": made[1],
        "new_decays": made[2],
        "table": table,
        "room": room,
        "key_stride": updates.keys.stride(0),
        "change_stride": updates.changes.stride(0),
        "decay_stride": updates.decays.stride(0),
    }
    grid = (triton.cdiv(value_dim, STEP_COLUMNS), heads, table.shape[0])
    launch(_verify_kernel, grid, arguments, num_warps=4)
