"""State rows: borrowing, pressure, and the last resort."""

from __future__ import annotations

import pytest
from cache_texts import Text
from cache_world import World, make_world

from vlm_serve.cache.pools import RowPool, RowState


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def rows(world: World) -> dict[str, int]:
    return {state: count for state, count in world.cache.usage.rows.items() if count}


def test_a_budget_of_zero_borrows_idle_live_rows_and_gives_them_back() -> None:
    world = make_world(num_live_rows=2, num_snapshot_rows=0)
    first, second = Text(numbers(9)), Text(numbers(9, 50))
    world.serve(first)
    assert rows(world) == {"ready": 1, "free": 1}
    assert world.match(first).boundary == 4
    a, b = world.start(Text(numbers(9, 80))), world.start(second)
    assert a is not None and b is not None
    assert rows(world) == {"live": 2}
    assert world.match(first).boundary == 0
    world.check()


def test_a_long_prefill_with_a_single_row_skips_its_snapshots() -> None:
    world, text = make_world(num_live_rows=1, num_snapshot_rows=0), Text(numbers(13))
    run = world.start(text, first=4)
    assert run is not None
    for end in (4, 8, 13):
        assert world.step(run, end)
    assert world.cache.stats.skips == {"test": 3}
    assert world.match(text).reason == "no_snapshot"
    world.check()


def test_stealing_happens_only_if_nobody_else_reads_the_snapshot() -> None:
    world, text = make_world(num_live_rows=2, num_snapshot_rows=0), Text(numbers(9))
    world.serve(text, snapshots=lambda position: position == 8)
    first, second = world.cache.open(world.match(text)), world.cache.open(world.match(text))
    assert first.src_row == second.src_row
    assert world.cache.take_row(first) and first.row != first.src_row
    # The other row is taken and the snapshot has two readers.
    assert not world.cache.take_row(second)
    world.check()
    world.cache.close(first)
    blocker = world.cache.open(None)
    assert world.cache.take_row(blocker)
    shared_row = second.src_row
    assert world.cache.take_row(second)
    assert second.row == second.src_row == shared_row
    assert world.cache.stats.stolen == 1
    world.snapshots.clear()
    world.check()
    assert world.match(text).reason == "snapshot_evicted"


def test_a_stolen_state_is_the_right_one() -> None:
    world, text = make_world(num_live_rows=2, num_snapshot_rows=0), Text(numbers(9))
    world.serve(text, snapshots=lambda position: position == 8)
    other = world.start(Text(numbers(5, 70)))
    run = world.start(text)
    assert other is not None and run is not None
    assert run.lease.row == run.lease.src_row
    assert world.step(run, 9)
    world.check()


def test_a_pool_of_pinned_rows_waits() -> None:
    world, text = make_world(num_live_rows=3, num_snapshot_rows=0), Text(numbers(13))
    world.serve(text, snapshots=lambda position: position == 12)
    readers = [world.cache.open(world.match(text)) for _ in range(2)]
    assert all(world.cache.take_row(lease) for lease in readers)
    late = world.cache.open(world.match(text))
    before = world.fingerprint()
    assert not world.cache.take_row(late)
    assert world.cache.reserve_snapshot(late, 13, "x") is None
    assert world.fingerprint()[0] == before[0]
    # One retry without the match finds no row either; it waits, and then there is one.
    world.cache.close(late)
    retry = world.cache.open(None)
    assert not world.cache.take_row(retry)
    world.cache.close(readers[0])
    assert world.cache.take_row(retry)
    world.check()


def test_reserving_twice_gives_the_same_row_and_positions_gone_by_are_refused() -> None:
    world, text = make_world(), Text(numbers(13))
    run = world.start(text)
    assert run is not None
    row = world.cache.reserve_snapshot(run.lease, 8, "x")
    assert world.cache.reserve_snapshot(run.lease, 8, "x") == row
    world.step(run, 8)
    with pytest.raises(AssertionError, match="gone by"):
        world.cache.reserve_snapshot(run.lease, 8, "x")


def test_a_node_that_has_a_snapshot_gets_no_second_one() -> None:
    world, text = make_world(), Text(numbers(13))
    world.serve(text, snapshots=lambda position: position == 8)
    lease = world.cache.open(world.match(text, limit=7))
    assert (lease.boundary, lease.shared_tokens) == (0, 12)
    assert world.cache.reserve_snapshot(lease, 8, "x") is None
    assert world.cache.reserve_snapshot(lease, 12, "x") is not None
    world.cache.close(lease)


@pytest.mark.parametrize("position", [2, 7])
def test_no_snapshot_belongs_off_the_cut_points(position: int) -> None:
    world, text = make_world(), Text(numbers(9))
    run = world.start(text)
    assert run is not None
    world.cache.reserve_snapshot(run.lease, position, "x")
    with pytest.raises(AssertionError, match=f"no snapshot belongs at {position}"):
        world.cache.commit(run.lease, text.keys, 9, exact_until=9)


def test_a_row_changes_state_only_from_the_state_it_is_in() -> None:
    pool = RowPool(2, 1)
    row = pool.take(RowState.LIVE)
    assert not pool.may_go_live
    with pytest.raises(AssertionError, match="is live, not reserved"):
        pool.change(row, RowState.RESERVED, RowState.READY)
    pool.change(row, RowState.LIVE, RowState.FREE)
    with pytest.raises(AssertionError, match="is free, not live"):
        pool.change(row, RowState.LIVE, RowState.FREE)


def test_unpinning_a_snapshot_twice_is_an_error() -> None:
    world, text = make_world(), Text(numbers(9))
    world.serve(text)
    match = world.match(text)
    assert match.snapshot is not None
    lease = world.cache.open(match)
    world.cache.close(lease)
    with pytest.raises(AssertionError, match="unpinned twice"):
        world.cache.ledger.unpin_snapshot(match.snapshot)
