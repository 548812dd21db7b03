"""Blocks and rows that have been in use once: their pages stay with the process."""

from __future__ import annotations

from vlm_serve.cache.pools import BlockPool, RowPool, RowState


def test_blocks_that_were_never_taken_cost_nothing() -> None:
    pool = BlockPool(8)
    first, second = pool.take(), pool.take()
    assert pool.num_touched == 2
    pool.loosen(first)
    pool.loosen(second)
    assert pool.num_free == 8 and pool.num_touched == 2
    for _ in range(2):
        pool.take()
    assert pool.num_touched == 2, "free blocks that have pages are taken first"
    pool.take()
    assert pool.num_touched == 3


def test_rows_that_were_never_taken_cost_nothing() -> None:
    pool = RowPool(4, 2)
    row = pool.take(RowState.RESERVED)
    pool.change(row, RowState.RESERVED, RowState.FREE)
    assert pool.num_touched == 1
    assert pool.take(RowState.LIVE) == row and pool.num_touched == 1
    pool.take(RowState.LIVE)
    assert pool.num_touched == 2
