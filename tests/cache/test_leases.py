"""A request's life: blocks, rows, pins, publication, failure."""

from __future__ import annotations

from typing import Any

import pytest
from cache_texts import END_OF_TURN, Image, Text
from cache_world import World, listed, make_world


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def test_growing_is_all_or_nothing() -> None:
    world = make_world(num_blocks=4)
    lease = world.cache.open(None)
    assert world.cache.grow(lease, 5) and len(lease.blocks) == 2
    before = world.fingerprint()
    assert not world.cache.grow(lease, 17)
    assert world.fingerprint() == before and len(lease.blocks) == 2
    assert world.cache.grow(lease, 16) and world.cache.grow(lease, 3)
    assert len(lease.blocks) == 4
    world.cache.close(lease)
    world.check()


def test_closing_twice_is_an_error() -> None:
    world = make_world()
    lease = world.cache.open(None)
    world.cache.close(lease)
    with pytest.raises(AssertionError, match="closed"):
        world.cache.close(lease)


def test_a_lease_takes_one_row_and_no_more_than_the_live_ones() -> None:
    world = make_world(num_live_rows=1, num_snapshot_rows=3)
    first, second = world.cache.open(None), world.cache.open(None)
    assert first.src_row == -1
    assert world.cache.take_row(first)
    with pytest.raises(AssertionError, match="has a row"):
        world.cache.take_row(first)
    assert not world.cache.take_row(second)
    world.cache.close(first)
    assert world.cache.take_row(second)
    world.cache.close(second)
    world.check()


def test_without_state_layers_no_row_is_needed() -> None:
    world = make_world(has_state=False)
    lease = world.cache.open(None)
    assert world.cache.take_row(lease) and lease.row == -1
    assert world.cache.reserve_snapshot(lease, 4, "media") is None
    world.cache.close(lease)


def test_committing_the_same_length_again_changes_nothing() -> None:
    world, text = make_world(), Text(numbers(9))
    run = world.start(text)
    assert run is not None
    world.step(run, 9)
    before = world.fingerprint()
    world.cache.commit(run.lease, text.keys, 9, exact_until=9)
    assert world.fingerprint() == before
    world.check()


def test_commits_go_forward_within_tokens_and_blocks() -> None:
    world, text = make_world(), Text(numbers(9))
    run = world.start(text, first=5)
    assert run is not None
    world.step(run, 5)
    for length in (4, 9, 10):
        with pytest.raises(AssertionError):
            world.cache.commit(run.lease, text.keys, length, exact_until=9)


def test_nothing_is_found_before_the_commit() -> None:
    world, text = make_world(), Text(numbers(9))
    run = world.start(text)
    assert run is not None
    world.cache.reserve_snapshot(run.lease, 8, "prompt_end")
    assert world.match(text).kv_tokens == 0
    world.step(run, 9)
    assert world.match(text).boundary == 8


def test_the_own_published_blocks_stay_while_the_request_runs() -> None:
    world, text = make_world(num_blocks=4), Text(numbers(12))
    run = world.start(text)
    assert run is not None
    world.step(run, 12)
    greedy = world.cache.open(None)
    assert not world.cache.grow(greedy, 8)
    assert world.match(text).boundary == 8
    world.close(run)
    assert world.cache.grow(greedy, 8)
    world.cache.close(greedy)
    world.check()


def test_the_same_prompt_computed_twice_at_once_is_kept_once() -> None:
    world, text = make_world(num_blocks=6), Text(numbers(9))
    first, second = world.start(text), world.start(text)
    assert first is not None and second is not None
    assert world.step(first, 9)
    assert world.step(second, 9)
    world.check()
    # The second request goes on in the blocks of the first and gives its own full ones back.
    assert second.lease.blocks[:2] == first.lease.blocks[:2]
    assert second.lease.blocks[2] != first.lease.blocks[2]
    assert world.cache.free_block_count == 2
    # Its snapshots had distinct rows and went back.
    assert world.cache.stats.duplicates == 2
    world.close(first)
    world.check()
    text.append(30)
    assert world.step(second, 10)
    world.close(second)
    world.check()


def test_the_second_request_may_publish_first() -> None:
    world, text = make_world(), Text(numbers(14))
    slow, fast = world.start(text, first=4), world.start(text)
    assert slow is not None and fast is not None
    world.step(slow, 6)
    world.step(fast, 14)
    world.close(fast)
    for end in (9, 14):
        assert world.step(slow, end)
        world.check()
    world.close(slow)
    world.check()


def test_a_later_snapshot_attaches_to_a_node_that_has_none() -> None:
    world, text = make_world(), Text(numbers(9))
    world.serve(text, snapshots=lambda position: position == 4)
    assert world.serve(text, snapshots=lambda position: position == 8).boundary == 4
    assert world.match(text).boundary == 8


def test_a_tail_hit_copies_the_rows_of_the_tail_once() -> None:
    world = make_world()
    world.serve(Text([10, END_OF_TURN], Image("cat", 4), numbers(7)))
    text = Text([10, END_OF_TURN], Image("cat", 4), numbers(9, 50))
    match = world.match(text)
    assert (match.boundary, match.kv_tokens) == (6, 4)
    lease = world.cache.open(match)
    assert world.cache.take_row(lease)
    assert match.tail is not None and match.snapshot is not None
    assert lease.src_row == match.snapshot.row != lease.row
    assert world.cache.grow(lease, 7)
    assert lease.copies == ((match.tail.block.id, lease.blocks[1], 2),)
    assert world.cache.grow(lease, 12)
    assert len(lease.copies) == 1
    world.cache.close(lease)
    world.check()


def test_a_restore_pin_survives_the_growth_of_others() -> None:
    """Snapshot, tail and their block stay until the first step has read them."""
    world = make_world(num_blocks=8, num_live_rows=2, num_snapshot_rows=1)
    head = Text([10, END_OF_TURN], Image("cat", 4), [5])
    world.serve(head, snapshots=lambda position: position == 6)
    run = world.start(Text([10, END_OF_TURN], Image("cat", 4), numbers(3, 50)))
    assert run is not None and run.lease.boundary == 6
    other = world.cache.open(None)
    assert world.cache.take_row(other)
    assert world.cache.grow(other, 16)
    assert not world.cache.grow(other, 20)
    assert world.cache.reserve_snapshot(other, 4, "interval") is None
    world.check()
    assert world.step(run, 9)
    # Released after the first commit: now both may go, for blocks and for rows.
    assert world.cache.reserve_snapshot(other, 4, "junction") is not None
    world.cache.close(other)
    world.close(run)
    world.check()


def test_abandon_gives_reservations_back_and_keeps_the_lease() -> None:
    world, text = make_world(num_live_rows=1, num_snapshot_rows=2), Text(numbers(13))
    run = world.start(text)
    assert run is not None
    rows = {world.cache.reserve_snapshot(run.lease, cut, "x") for cut in (4, 8)}
    assert len(rows) == 2 and None not in rows
    assert world.cache.reserve_snapshot(run.lease, 12, "x") is None
    world.cache.abandon(run.lease)
    assert world.cache.reserve_snapshot(run.lease, 12, "x") in rows
    world.check()
    world.close(run)
    world.check()
    assert not world.nodes


@pytest.mark.parametrize("reserved", [False, True])
@pytest.mark.parametrize("slices", [0, 1, 2])
def test_a_failed_step_publishes_nothing_and_leaks_nothing(reserved: bool, slices: int) -> None:
    world, text = make_world(), Text([10, END_OF_TURN], Image("cat", 6), numbers(8))
    world.serve(Text([10, END_OF_TURN], Image("cat", 6), [90]))
    free, found = world.cache.free_block_count, dict(world.nodes)
    run = world.start(text, first=10)
    assert run is not None
    for end in (10, 13)[:slices]:
        world.step(run, end, lambda position: reserved)
    free_now = world.cache.free_block_count
    world.fail(run, 16)
    world.check()
    if slices == 0:
        assert world.cache.free_block_count == free > free_now
        assert world.nodes == found
    assert world.serve(text).boundary >= 8


def test_rolling_a_tentative_match_back_leaves_no_trace() -> None:
    """Not even the recency of what it pinned."""
    world = make_world(num_blocks=8, num_live_rows=1)
    text = Text([10, END_OF_TURN], Image("cat", 4), numbers(7))
    world.serve(text)
    runner = world.start(Text(numbers(12, 60)))
    assert runner is not None
    before = world.fingerprint()
    lease = world.cache.open(world.match(text))
    assert not world.cache.take_row(lease)
    assert not world.cache.grow(lease, 40)
    world.cache.close(lease)
    assert world.fingerprint() == before
    world.check()


def admit(world: World, text: Text, *, fails: bool = False, **options: Any) -> None:
    """An admission that is recorded, and its only step."""
    match = world.match(text)
    run = world.start(text)
    assert run is not None
    before = world.cache.stats.requests
    world.cache.record(run.lease, match, len(text), **options)
    assert world.cache.stats.requests == before, "told before the step has succeeded"
    if fails:
        world.fail(run, len(text))
    else:
        assert world.step(run, len(text))
        world.close(run)


def test_recorded_admissions_ignore_replays_and_failed_steps() -> None:
    world, text = make_world(), Text(numbers(9))
    admit(world, text, fails=True)
    admit(world, text)
    admit(world, text)
    admit(world, text, replay=True)
    admit(world, text, used=0)
    stats = world.cache.stats
    assert (stats.requests, stats.query_tokens, stats.hit_tokens, stats.replays) == (3, 27, 8, 1)
    assert stats.as_dict()["reasons"] == {"cold": 1, "full": 2}


def test_hits_count_once_the_first_step_has_succeeded() -> None:
    world, text = make_world(), Text(numbers(9))
    world.serve(text)
    rolled_back = world.start(text)
    assert rolled_back is not None
    world.close(rolled_back)
    assert [node.hits for node in listed(world)] == [0, 0]
    world.serve(text)
    assert [node.hits for node in listed(world)] == [1, 1]


def test_a_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    world, text = make_world(), Text(numbers(10))
    run = world.start(text)
    assert run is not None
    world.step(run, 10)
    child = world.fork(run)
    assert child is not None
    assert child.lease.blocks[:2] == run.lease.blocks[:2]
    assert child.lease.copies == ((run.lease.blocks[2], child.lease.blocks[2], 2),)
    assert child.lease.row != run.lease.row
    # The parent may leave before the child has copied: its block stays until then.
    world.close(run)
    world.check()
    child.text.append(50)
    assert world.step(child, 11)
    world.close(child)
    world.check()


@pytest.mark.parametrize("length", [8, 10])
def test_a_fork_without_room_changes_nothing(length: int) -> None:
    world, text = make_world(num_blocks=3, num_live_rows=2, num_snapshot_rows=0), Text(numbers(10))
    run = world.start(text, first=length)
    assert run is not None
    world.step(run, length)
    taken = world.cache.open(None)
    if length == 8:
        assert world.cache.take_row(taken)
    else:
        assert world.cache.free_block_count == 0
    before = world.fingerprint()
    assert world.fork(run) is None
    assert world.fingerprint() == before


def test_forks_share_blocks_with_the_cache_switched_off() -> None:
    world, text = make_world(enabled=False, num_blocks=4), Text(numbers(10))
    run = world.start(text)
    assert run is not None
    world.step(run, 10)
    child = world.fork(run)
    assert child is not None and world.cache.free_block_count == 0
    world.close(run)
    child.text.append(50)
    assert world.step(child, 11)
    world.check()
    world.close(child)
    assert world.cache.free_block_count == 4


def test_a_prompt_of_nothing_but_turn_ends_costs_a_bounded_number_of_nodes() -> None:
    world = make_world(block_size=64, num_blocks=4)
    text = Text([END_OF_TURN] * 128, block_size=64)
    run = world.start(text)
    assert run is not None
    # More cut points than tails are published: the dict model does not know that bound.
    world.cache.commit(run.lease, text.keys, 128, exact_until=128)
    assert world.cache.usage.nodes == 2 + 2 * 15
    world.cache.check()
