"""Preemption: what a suspended request keeps, and when it loses it (docs/architecture.md#state)."""

from __future__ import annotations

import pytest
from cache_texts import Text
from cache_world import make_world


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("length", [4, 6, 8, 9])
def test_resuming_is_exact_partial_block_included(length: int, has_state: bool) -> None:
    world, text = make_world(has_state=has_state), Text(numbers(13))
    run = world.start(text)
    assert run is not None
    world.step(run, length)
    blocks, row = list(run.lease.blocks), run.lease.row
    assert world.suspend(run)
    world.check()
    kept = -(-length // 4)
    assert world.cache.free_block_count == 64 - kept, "blocks not computed yet go back"
    assert world.parked[0][1].length == length
    assert world.resume(0)
    world.check()
    assert run.lease.blocks == blocks[:kept]
    assert (run.lease.row, run.lease.src_row) == (row, row)
    assert world.step(run, 13)
    world.close(run)
    world.check()


@pytest.mark.parametrize("suspended", [False, True])
def test_a_secluded_request_keeps_its_path_and_adds_nothing(suspended: bool) -> None:
    """Published nodes stay readable for it after the weights have changed."""
    world = make_world()
    run = world.start(Text(numbers(17)))
    assert run is not None
    world.step(run, 9)
    if suspended:
        assert world.suspend(run)
    lease = world.parked[0][1].lease if suspended else run.lease
    assert lease is not None
    world.cache.seclude(lease)
    if suspended:
        assert world.resume(0)
    world.check()
    world.step(run, 17)
    world.cache.check()
    assert len([*world.cache.nodes()]) == len(run.lease.path) == 2


def test_nothing_computed_is_nothing_to_keep() -> None:
    world = make_world()
    run = world.start(Text(numbers(9)))
    assert run is not None
    assert not world.suspend(run)
    assert world.cache.free_block_count == 64
    world.check()


def test_a_preempted_request_gives_its_reservations_back() -> None:
    world = make_world(num_live_rows=1, num_snapshot_rows=1)
    run = world.start(Text(numbers(13)))
    assert run is not None
    world.step(run, 4, lambda position: False)
    assert world.cache.reserve_snapshot(run.lease, 8, "x") is not None
    assert world.suspend(run)
    world.check()
    assert world.cache.usage.rows == {
        "free": 1,
        "live": 0,
        "reserved": 0,
        "ready": 0,
        "private": 1,
    }


def test_suspended_requests_go_before_snapshots_oldest_first() -> None:
    world = make_world(num_live_rows=2, num_snapshot_rows=1)
    world.serve(Text(numbers(5, 80)))
    for first in (10, 30):
        run = world.start(Text(numbers(7, first)))
        assert run is not None
        world.step(run, 6, lambda position: False)
    for run in list(world.runs):
        world.suspend(run)
    lease = world.cache.open(None)
    assert world.cache.take_row(lease)
    world.check()
    assert [suspended.valid for _, suspended in world.parked] == [False, True]
    assert world.match(Text(numbers(5, 80))).boundary == 4
    assert world.cache.stats.evictions["suspended"] == 1
    assert not world.resume(0)
    assert world.resume(0)
    world.check()


def test_useless_kv_goes_before_suspended_requests_and_they_before_the_rest() -> None:
    world = make_world(num_blocks=9)
    world.serve(Text(numbers(4, 70)), snapshots=lambda position: False)
    world.serve(Text(numbers(8, 50)), snapshots=lambda position: position == 8)
    run = world.start(Text(numbers(14)))
    assert run is not None
    world.step(run, 14, lambda position: False)
    world.suspend(run)
    _, suspended = world.parked[0]
    other = world.cache.open(None)
    assert world.cache.available_block_count == 9
    assert world.cache.grow(other, 12)
    assert suspended.valid and world.match(Text(numbers(5, 70))).kv_tokens == 0
    assert world.cache.grow(other, 16)
    assert not suspended.valid
    assert world.match(Text(numbers(9, 50))).boundary == 8
    world.check()


def test_the_path_of_a_suspended_request_stays_as_long_as_it_is_valid() -> None:
    """KV that only a suspended request stands on is not useless."""
    world = make_world(num_blocks=6)
    run = world.start(Text(numbers(12)))
    assert run is not None
    world.step(run, 10, lambda position: False)
    world.suspend(run)
    other = world.start(Text(numbers(12, 50)))
    assert other is not None
    assert world.parked[0][1].valid
    assert world.resume(0)
    assert world.step(run, 12)
    world.check()


def test_an_evicted_request_resumes_through_its_own_published_blocks() -> None:
    world = make_world(num_live_rows=1, num_snapshot_rows=1)
    run = world.start(Text(numbers(13)))
    assert run is not None
    world.step(run, 10, lambda position: position == 8)
    world.suspend(run)
    other = world.start(Text(numbers(5, 50)))
    assert other is not None
    world.close(other)
    assert not world.resume(0)
    assert world.match(run.text).boundary == 8


@pytest.mark.parametrize("evicted", [False, True])
def test_dropping_gives_everything_back_once(evicted: bool) -> None:
    world = make_world()
    run = world.start(Text(numbers(13)))
    assert run is not None
    world.step(run, 10)
    world.suspend(run)
    if evicted:
        world.cache.flush()
    _, suspended = world.parked[0]
    world.drop(0)
    world.check()
    world.cache.drop(suspended)
    assert world.cache.resume(suspended) is None
    world.cache.flush()
    assert world.cache.free_block_count == 64


def test_the_blocks_of_a_suspended_request_serve_others_meanwhile() -> None:
    world, text = make_world(), Text(numbers(13))
    run = world.start(text)
    assert run is not None
    world.step(run, 13)
    world.suspend(run)
    assert world.serve(text).boundary == 12
    assert world.resume(0)
    world.close(run)
    world.check()


def test_resuming_waits_for_a_live_row() -> None:
    """The rows are there, but as many are live as may be: nothing is lost by asking."""
    world = make_world(num_live_rows=1, num_snapshot_rows=2)
    run = world.start(Text(numbers(7)))
    assert run is not None
    world.step(run, 6, lambda position: False)
    assert world.suspend(run)
    other = world.cache.open(None)
    assert world.cache.take_row(other)
    suspended = world.parked[0][1]
    assert world.cache.resume(suspended) is None
    assert suspended.valid
    world.check()
    world.cache.close(other)
    assert world.resume(0)
    world.check()
