"""The row of a request that ends at a cut point becomes the snapshot there, without a copy."""

from __future__ import annotations

import pytest
from cache_texts import END_OF_TURN, Image, Text
from cache_world import Run, World, make_world

from vlm_serve.cache.matching import key_at
from vlm_serve.cache.prefix_cache import LeftState


def computed(world: World, text: Text, end: int) -> Run:
    """A request that has computed its tokens up to `end`, without a snapshot."""
    run = world.start(text, first=end)
    assert run is not None and world.step(run, end, snapshots=lambda position: False)
    return run


def leave(world: World, run: Run, *, becomes: bool) -> None:
    row, length = run.lease.row, run.lease.length
    if becomes:
        world.snapshots[key_at(run.text.keys, length)] = run.text.digests[length]
    world.runs.remove(run)
    world.cache.close(run.lease, LeftState(run.text.keys, run.exact_until))
    assert (world.cache.ledger.rows.states[row].value == "ready") == becomes
    world.check()


@pytest.mark.parametrize("end", [8, 9])
def test_a_row_at_a_cut_is_what_the_next_request_starts_from(end: int) -> None:
    world, text = make_world(), Text([*range(5, 13), END_OF_TURN, *range(20, 30)])
    free = world.cache.ledger.rows.num_free
    leave(world, computed(world, text, end), becomes=True)
    assert world.cache.ledger.rows.num_free == free - 1, "its own row, and no other"
    assert world.cache.stats.saves == {"left": 1}
    assert world.match(text).boundary == end
    again = world.start(text)
    assert again is not None and world.step(again, len(text))


def test_a_row_between_two_cuts_is_returned() -> None:
    world, text = make_world(), Text(list(range(5, 25)))
    leave(world, computed(world, text, 7), becomes=False)


def test_a_row_inside_of_a_medium_is_returned() -> None:
    world, text = make_world(), Text([5, 6], Image("a", 8), [7, 8, 9])
    leave(world, computed(world, text, 8), becomes=False)


def test_a_second_row_for_one_place_is_returned() -> None:
    world, text = make_world(), Text(list(range(5, 25)))
    first, second = computed(world, text, 8), computed(world, text, 8)
    leave(world, first, becomes=True)
    leave(world, second, becomes=False)


def test_what_no_step_has_written_is_returned() -> None:
    world, text = make_world(), Text(list(range(5, 25)))
    run = world.start(text, first=8)
    assert run is not None
    leave(world, run, becomes=False)


def test_a_private_request_leaves_nothing() -> None:
    world, text = make_world(), Text(list(range(5, 25)))
    lease = world.cache.open(None, private=True)
    assert world.cache.take_row(lease) and world.cache.grow(lease, 8)
    world.cache.commit(lease, text.keys, 8, exact_until=20)
    world.cache.close(lease, LeftState(text.keys, 20))
    world.check()


def test_a_suspended_request_leaves_its_row_too() -> None:
    world, text = make_world(), Text(list(range(5, 25)))
    run = computed(world, text, 8)
    assert world.suspend(run)
    _, suspended = world.parked.pop()
    world.snapshots[key_at(text.keys, 8)] = text.digests[8]
    world.cache.drop(suspended, LeftState(text.keys, run.exact_until))
    world.check()
    assert world.match(text).boundary == 8


def test_decoded_tokens_make_the_state_a_decoded_one() -> None:
    world, text = make_world(), Text(list(range(5, 25)))
    run = computed(world, text, 8)
    run.exact_until = 6
    leave(world, run, becomes=True)
    snapshot = world.match(text).snapshot
    assert snapshot is not None and not snapshot.exact
