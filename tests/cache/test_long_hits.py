"""What a hit costs does not grow with its prefix: no statement runs for each of its blocks."""

from __future__ import annotations

from functools import partial

import pytest
from cache_texts import END_OF_TURN, Text
from cache_world import World, make_world
from lines_run import lines_of

from vlm_serve.cache.node_table import NOBODY


def conversation(blocks: int) -> Text:
    """Two tokens behind a message of so many blocks."""
    return Text([10] * (4 * blocks - 1), [END_OF_TURN], [7, 8])


def computed(blocks: int) -> tuple[World, Text]:
    """A world that has computed a conversation once, with a state at the end of its message."""
    world, text = make_world(num_blocks=2 * blocks + 8), conversation(blocks)
    run = world.start(text)
    assert run is not None
    world.step(run, len(text), lambda cut: cut == 4 * blocks)
    world.close(run)
    return world, text


def hit(world: World, text: Text) -> None:
    cache = world.cache
    match = cache.match(text.keys, limit=len(text) - 1)
    assert match.boundary == len(text) - 2 and match.reason == "full"
    lease = cache.open(match)
    assert cache.take_row(lease) and cache.grow(lease, len(text))
    cache.commit(lease, text.keys, len(text), exact_until=len(text))
    cache.snapshot_positions(text.keys, len(text))
    suspended = cache.suspend(lease)
    assert suspended is not None
    again = cache.resume(suspended)
    assert again is not None
    cache.close(again)


def test_no_line_runs_for_each_block_of_a_hit() -> None:
    counts = []
    for blocks in (8, 64, 512):
        world, text = computed(blocks)
        counts.append(lines_of("/cache/", partial(hit, world, text)))
        world.check()
    # Finding the deepest known block takes a step more for each doubling.
    assert counts[2] - counts[0] <= 40, counts


def test_a_hit_counts_for_every_node_of_its_path() -> None:
    world, text = computed(3)
    hit(world, text)
    path = world.cache.ledger.trie.path(text.keys)
    assert [node.hits for node in path] == [1, 1, 1]
    assert len({node.last_used for node in path}) == 1
    assert [node.pins for node in path] == [0, 0, 0]
    assert world.cache.ledger.blocks.num_reclaimable == 3


def test_an_evicted_node_has_no_counters_of_another_one() -> None:
    world, text = computed(2)
    hit(world, text)
    path = world.cache.ledger.trie.path(text.keys)
    world.cache.flush()
    assert [node.slot for node in path] == [NOBODY, NOBODY]
    other = Text([20] * 8, [7])
    run = world.start(other)
    assert run is not None
    world.step(run, len(other))
    assert [(node.pins, node.hits, node.last_used) for node in path] == [(0, 0, 0)] * 2
    world.close(run)
    world.check()


@pytest.mark.parametrize("blocks", [1, 7, 40])
def test_pins_of_two_leases_and_a_timed_pin_add_up(blocks: int) -> None:
    world, text = computed(blocks)
    cache = world.cache
    first, second = (cache.open(cache.match(text.keys, limit=len(text) - 1)) for _ in range(2))
    assert cache.pin(text.keys, until=1.0) == 4 * blocks
    path = cache.ledger.trie.path(text.keys)
    assert [node.pins for node in path] == [3] * blocks
    assert cache.ledger.blocks.num_reclaimable == 0
    cache.close(first)
    cache.timed_pins.clear()
    assert [node.pins for node in path] == [1] * blocks
    cache.close(second)
    assert [node.pins for node in path] == [0] * blocks
    world.check()
