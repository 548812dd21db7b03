"""Attention in parts of fixed length at absolute positions, whose sums are merged in their order.

A tile's sums of one part are a maximum, a norm and totals for each row. A program attends to one
part or walks several, each begun anew. So a row's bits depend neither on how parts are spread over
programs, nor on the rows beside it: a part behind all keys that a row sees changes nothing of it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from vlm_serve.kernels.paged_attention.tiles_triton import attend


@triton.jit
def tile_at(index, tables, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Return a tile of queries: (first token of its slice, tokens of the slice, position of the
    first one, first row of the tile), its sequence, and how many keys its last row sees.

    Row r of a slice is token r // GROUP, head r % GROUP. So few new tokens still fill a tile, and
    each key is read once for all heads that share it. `tables`: (lengths,) of decode tokens, each a
    slice of its own, or (sequences of tiles, their first rows, offsets of slices, positions).
    """
    if len(tables) == 1:
        sequence = index
        begin = index
        tokens = 1
        start = tl.load(tables[0] + index) - 1
        first_row = 0
    else:
        sequence = tl.load(tables[0] + index)
        begin = tl.load(tables[2] + sequence)
        tokens = tl.load(tables[2] + sequence + 1) - begin
        start = tl.load(tables[3] + sequence)
        first_row = tl.load(tables[1] + index)
    length = start + tl.minimum((first_row + ROWS - 1) // GROUP, tokens - 1) + 1
    return (begin, tokens, start, first_row), sequence, length


@triton.jit
def part_range(length, most, place, PART: tl.constexpr):
    """Return the parts (first, end) of a tile's program `place`, of `most`: each of the others has
    one of the last parts, the first program all before them."""
    parts = tl.cdiv(length, PART)
    skipped = parts - tl.minimum(parts, most)
    first = tl.where(place == 0, 0, skipped + place)
    return first, tl.minimum(skipped + place + 1, parts)


@triton.jit
def merged(sums, own):
    """Merge the sums of the next part into those of the parts before it."""
    best, norm, total = sums
    own_best, own_norm, own_total = own
    larger = tl.maximum(best, own_best)
    shrink = tl.exp2(best - larger)
    weight = tl.exp2(own_best - larger)
    norm = tl.fma(norm, shrink, own_norm * weight)
    total = tl.fma(total, shrink[:, None], own_total * weight[:, None])
    return larger, norm, total


@triton.jit
def load_sums(sums, rows, known, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Load the sums of rows: (maximum, an exponent of two; norm; totals). Rows that are not `known`
    have those of no key."""
    best_at, norm_at, total_at = sums
    dims = tl.arange(0, BLOCK_DIM)
    inside = known[:, None] & (dims < DIM)[None, :]
    return (
        tl.load(best_at + rows, mask=known, other=float("-inf")),
        tl.load(norm_at + rows, mask=known, other=0.0),
        tl.load(total_at + rows[:, None] * DIM + dims[None, :], mask=inside, other=0.0),
    )


@triton.jit
def _store_sums(sums, rows, known, values, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    best_at, norm_at, total_at = sums
    best, norm, total = values
    dims = tl.arange(0, BLOCK_DIM)
    tl.store(best_at + rows, best, mask=known)
    tl.store(norm_at + rows, norm, mask=known)
    inside = known[:, None] & (dims < DIM)[None, :]
    tl.store(total_at + rows[:, None] * DIM + dims[None, :], total, mask=inside)


@triton.jit
def store_result(
    results,
    tile,
    kv_head,
    rows,
    sums,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    GATED: tl.constexpr,
):
    """Store the results of some rows of a slice; with a gate, multiply the rounded ones by its
    sigmoids, as `times_sigmoid` does. `results`: pointers to results and gate, and the stride of
    the gate's rows."""
    out, gate, gate_stride = results
    begin, tokens, _start, _first_row = tile
    _best, norm, total = sums
    token = (begin + rows // GROUP).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, total.shape[1])
    inside = (rows < tokens * GROUP)[:, None] & (dims < DIM)[None, :]
    result = (total / norm[:, None]).to(out.dtype.element_ty)
    if GATED:
        own = gate + (token * gate_stride + head * DIM)[:, None] + dims[None, :]
        gates = tl.load(own, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) / (1.0 + tl.exp(-gates))).to(result.dtype)
    places = (token * HEADS + head)[:, None] * DIM + dims[None, :]
    tl.store(out + places, result, mask=inside)


@triton.jit
def _keep(
    values,
    results,
    sums,
    tables,
    program,
    first,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    STORED: tl.constexpr,
    MERGED: tl.constexpr,
    GATED: tl.constexpr,
):
    """Store the results of a tile whose keys are one part, or its sums of a part; merge them into
    those of the program's parts before, unless it is the `first`."""
    BLOCK_DIM: tl.constexpr = values[2].shape[1]
    index, kv_head, place, most, slots = program
    # Read again: what would be kept for this has no room in registers.
    tile, _sequence, length = tile_at(index, tables, ROWS, GROUP)
    _begin, tokens, _start, first_row = tile
    members = tl.arange(0, ROWS)
    if length <= PART:
        rows = first_row + members
        store_result(results, tile, kv_head, rows, values, GROUP, HEADS, DIM, GATED)
    else:
        slot = index.to(tl.int64) * slots
        own = ((slot + place) * (HEADS // GROUP) + kv_head) * STORED
        spare = ((slot + most) * (HEADS // GROUP) + kv_head) * STORED
        real = first_row + members < tokens * GROUP
        _store_sums(sums, tl.where(first, own, spare) + members, real, values, DIM, BLOCK_DIM)
        if not first:
            # In memory, some rows at a time: a second set of totals has no room in registers.
            # Several threads read a row's maximum and norm, before one of them writes.
            tl.debug_barrier()
            for row in range(0, STORED, MERGED):
                chosen = row + tl.arange(0, MERGED)
                known = (chosen < STORED) & (first_row + chosen < tokens * GROUP)
                before = load_sums(sums, own + chosen, known, DIM, BLOCK_DIM)
                added = load_sums(sums, spare + chosen, known, DIM, BLOCK_DIM)
                both = merged(before, added)
                tl.debug_barrier()
                _store_sums(sums, own + chosen, known, both, DIM, BLOCK_DIM)
            tl.debug_barrier()


@triton.jit
def attend_parts(
    queries_at,
    results,
    sums,
    tables,
    program,
    block_tables,
    pages,
    page_strides,
    scale_strides,
    block_size,
    score_scale,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    STORED: tl.constexpr,
    MERGED: tl.constexpr,
    GATED: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """Attend from a tile of query rows of one key head to the parts of one of its programs.

    Args:
        queries_at: pointer, strides of tokens and heads; sums: pointers to maxima, norms, totals.
        program: (tile, key head, the tile's program, how many it has at most, its slots).
        block_tables: pointer, stride, and tokens of a decode step that share one.
        results, tables: see `store_result`, `tile_at`; pages to score_scale: see `attend`.
        STORED: rows of a tile that have sums; MERGED: of them at a time, a power of two.
        HIDDEN: the number of first keys that no query sees, fewer than a tile has.
    """
    q, q_token_stride, q_head_stride = queries_at
    index, kv_head, place, most, _slots = program
    blocks, table_stride, tokens_per_table = block_tables
    tile, sequence, length = tile_at(index, tables, ROWS, GROUP)
    begin, tokens, start, first_row = tile
    table = blocks + sequence.to(tl.int64) // tokens_per_table * table_stride
    rows = first_row + tl.arange(0, ROWS)
    real = rows < tokens * GROUP
    dims = tl.arange(0, BLOCK_DIM)
    inside = real[:, None] & (dims < DIM)[None, :]
    q_rows = (begin + rows // GROUP).to(tl.int64) * q_token_stride
    q_rows += (kv_head * GROUP + rows % GROUP) * q_head_stride
    queries = tl.load(q + q_rows[:, None] + dims[None, :], mask=inside, other=0.0).to(DOT)
    # Rows past the slice compute finite values and are not stored.
    positions = start + tl.where(real, rows // GROUP, 0)
    # Keys visible to every row come first, without masks.
    common = (start + first_row // GROUP + 1) // KEY_TILE * KEY_TILE
    first_part, end_part = part_range(length, most, place, PART)
    # What is the same in every part is computed again: it has no room in registers either.
    for part in tl.range(first_part, end_part, disable_licm=True):
        first_key = part * PART
        last_key = tl.minimum(first_key + PART, length)
        whole = tl.maximum(tl.minimum(common, last_key), first_key)
        if HIDDEN:
            # All tiles of the first part are masked, since the first of them must be.
            whole = tl.where(part == 0, first_key, whole)
        best, norm, total = attend(
            queries,
            positions,
            (first_key, whole, last_key),
            length,
            table,
            kv_head,
            pages,
            page_strides,
            scale_strides,
            block_size,
            score_scale,
            DIM,
            KEY_TILE,
            ONE_BLOCK,
            FORM,
            PRECISION,
            HIDDEN,
        )
        _keep(
            (best * score_scale, norm, total),
            results,
            sums,
            tables,
            program,
            part == first_part,
            GROUP,
            HEADS,
            DIM,
            ROWS,
            PART,
            STORED,
            MERGED,
            GATED,
        )
