"""Routed expert rows kept with the KV (docs/architecture.md#routed-experts)."""

from __future__ import annotations

import numpy as np
from cache_texts import END_OF_TURN, Image, Text
from cache_world import World, make_world

from vlm_serve.cache.prefix_cache import Lease


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def compute(world: World, text: Text, *ends: int, capture: bool = True) -> None:
    run = world.start(text, capture=capture)
    assert run is not None
    for end in ends or (len(text),):
        world.step(run, end)
        world.check()
    world.close(run)


def known(world: World, lease: Lease) -> list[tuple[int, int, bool]]:
    return [(p.start, p.end, p.rows is not None) for p in world.cache.cached_experts(lease)]


def test_rows_of_cached_tokens_are_replayed() -> None:
    world, text = make_world(), Text([10, END_OF_TURN], Image("cat", 4), numbers(7))
    compute(world, text, 5, 7, 12, 13)
    lease = world.cache.open(world.match(text))
    pieces = world.cache.cached_experts(lease)
    assert [(piece.start, piece.end) for piece in pieces] == [(0, 4), (4, 8), (8, 12)]
    rows = [piece.rows for piece in pieces if piece.rows is not None]
    assert np.array_equal(np.concatenate(rows), text.experts(0, 12))


def test_a_tail_brings_the_rows_of_its_part_of_the_block() -> None:
    world = make_world()
    compute(world, Text([10, END_OF_TURN], Image("cat", 4), numbers(7)))
    text = Text([10, END_OF_TURN], Image("cat", 4), numbers(9, 50))
    run = world.start(text)
    assert run is not None
    assert known(world, run.lease) == [(0, 4, True), (4, 6, True)]
    # The block that starts with the tail's rows becomes complete.
    world.step(run, len(text))
    world.close(run)
    assert world.match(text, complete=True).boundary == 12
    world.check_experts(text, world.cache.open(world.match(text)))


def test_nodes_made_without_rows_get_them_later() -> None:
    world, text = make_world(), Text(numbers(13))
    compute(world, text, capture=False)
    lease = world.cache.open(world.match(text))
    assert known(world, lease) == [(0, 4, False), (4, 8, False), (8, 12, False)]
    world.cache.close(lease)
    # Best effort reuses everything; complete mode computes again and fills in.
    assert world.match(text).boundary == 12
    clamped = world.match(text, complete=True)
    assert (clamped.boundary, clamped.kv_tokens) == (0, 12)
    run = world.start(text, complete=True)
    assert run is not None
    world.step(run, 13)
    world.close(run)
    assert world.match(text, complete=True).boundary == 12


def test_complete_mode_stops_at_the_first_gap() -> None:
    world, text = make_world(), Text(numbers(17))
    run = world.start(text)
    assert run is not None
    for end, capture in ((4, True), (8, False), (17, True)):
        run.capture = capture
        world.step(run, end)
    world.close(run)
    match = world.match(text, complete=True)
    assert (match.boundary, match.state_boundary, match.reason) == (4, 16, "experts_missing")
    lease = world.cache.open(world.match(text))
    assert [piece[2] for piece in known(world, lease)] == [True, False, True, True]


def test_a_tail_may_know_rows_that_its_full_block_lacks() -> None:
    """Without state layers too, where a tail inside a matched block is not needed for its KV."""
    world = make_world(has_state=False)
    text = Text([10, END_OF_TURN, 11, 12, 13])
    run = world.start(text)
    assert run is not None
    world.step(run, 2)
    run.capture = False
    world.step(run, 5)
    match = world.match(text, limit=3, complete=True)
    assert match.boundary == 2
    lease = world.cache.open(match)
    assert known(world, lease) == [(0, 2, True)]


def test_a_gap_within_a_block_leaves_the_block_without_rows() -> None:
    world, text = make_world(), Text(numbers(13))
    run = world.start(text)
    assert run is not None
    for end, capture in ((2, True), (3, False), (6, True), (13, True)):
        run.capture = capture
        world.step(run, end)
    lease = world.cache.open(world.match(text))
    assert [piece[2] for piece in known(world, lease)] == [False, True, True]


def test_a_start_inside_a_block_without_rows_leaves_a_gap() -> None:
    world = make_world()
    compute(world, Text([10, END_OF_TURN], Image("cat", 4), [5]), capture=False)
    text = Text([10, END_OF_TURN], Image("cat", 4), numbers(9, 50))
    run = world.start(text)
    assert run is not None and run.lease.boundary == 6
    world.step(run, len(text))
    world.close(run)
    lease = world.cache.open(world.match(text))
    assert [piece[2] for piece in known(world, lease)] == [False, False, True]


def test_a_junction_fills_in_the_shared_blocks_it_passes() -> None:
    world = make_world()
    first = Text(numbers(16), numbers(5, 50))
    run = world.start(first, capture=False)
    assert run is not None
    world.step(run, 21, lambda position: position == 4)
    world.close(run)
    second = Text(numbers(16), numbers(5, 70))
    match = world.match(second)
    assert (match.boundary, match.kv_boundary, match.junction) == (4, 16, True)
    compute(world, second)
    lease = world.cache.open(world.match(second))
    assert [piece[2] for piece in known(world, lease)] == [False, True, True, True, True]


def test_rows_are_no_part_of_identity_and_the_first_ones_stay() -> None:
    world, text = make_world(), Text(numbers(9))
    a, b = world.start(text), world.start(text)
    assert a is not None and b is not None
    b.capture = False
    world.step(b, 9)
    assert world.match(text, complete=True).boundary == 0
    world.step(a, 9)
    assert world.match(text, complete=True).boundary == 8
    world.check()


def test_stored_rows_are_copies_that_nobody_can_change() -> None:
    world, text = make_world(), Text(numbers(9))
    run = world.start(text)
    assert run is not None
    rows = text.experts(0, 9)
    world.forward(run, 9, {})
    world.cache.commit(run.lease, text.keys, 9, exact_until=9, experts=rows)
    rows[:] = 0
    stored = world.cache.ledger.trie.walk().__next__().experts
    assert stored is not None
    assert np.array_equal(stored, text.experts(0, 4))
    assert not stored.flags.writeable


def test_a_fork_goes_on_with_the_rows_so_far() -> None:
    world, text = make_world(), Text(numbers(6))
    run = world.start(text)
    assert run is not None
    world.step(run, 6)
    child = world.fork(run)
    assert child is not None
    for token in (60, 61, 62):
        child.text.append(token)
        assert world.step(child, len(child.text))
    assert world.match(child.text, complete=True).boundary == 8


def test_bytes_are_counted_and_go_with_the_node() -> None:
    world, text = make_world(), Text(numbers(9))
    compute(world, text)
    assert world.cache.usage.expert_bytes == text.experts(0, 8).nbytes
    world.cache.flush()
    assert world.cache.usage.expert_bytes == 0
