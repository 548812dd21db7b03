"""Timed pins, gauges, the listing of the trie, and the bounds on bookkeeping."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from cache_texts import END_OF_TURN, Image, Text
from cache_world import World, listed, make_world

import vlm_serve.cache.prefix_cache
from vlm_serve.cache.candidates import LazyHeap
from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.listing import MediaInfo
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.preprocess.identity.keys import PromptKeys


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


# Timed pins


def test_a_pinned_prefix_outlives_pressure_until_its_time() -> None:
    world, text = make_world(num_blocks=10, num_live_rows=1, num_snapshot_rows=1), Text(numbers(13))
    world.serve(text, snapshots=lambda position: position == 12)
    assert world.cache.pin(text.keys, until=5.0) == 12
    runner, other = world.start(Text(numbers(5, 80))), world.cache.open(None)
    assert runner is not None
    assert not world.cache.grow(other, 30)
    assert world.cache.reserve_snapshot(other, 4, "x") is None
    world.check()
    assert world.cache.timed_pins.expire(now=4.9) == 0
    assert not world.cache.grow(other, 30)
    assert world.cache.timed_pins.expire(now=5.0) == 1
    assert world.cache.grow(other, 30)
    world.check()


def test_pinning_again_moves_the_end() -> None:
    world, text = make_world(), Text(numbers(13))
    world.serve(text)
    assert world.cache.pin(text.keys, until=5.0) == 12
    assert world.cache.pin(text.keys, until=9.0) == 12
    assert world.cache.timed_pins.expire(now=6.0) == 0
    assert world.cache.timed_pins.expire(now=9.0) == 1
    assert world.cache.timed_pins.expire(now=10.0) == 0
    world.check()


def test_a_pin_reaches_as_far_as_state_does_tails_included() -> None:
    world = make_world()
    text = Text([10, END_OF_TURN], Image("cat", 8), numbers(7))
    world.serve(text, snapshots=lambda position: position == 10)
    assert world.cache.pin(text.keys, until=1.0) == 10
    pinned = [(node.start, node.end) for node in listed(world) if node.pins]
    assert pinned == [(0, 4), (4, 8), (8, 10)]
    assert world.cache.pin(Text(numbers(9, 60)).keys, until=1.0) == 0


def test_a_node_is_pinned_with_all_before_it_and_the_deepest_state() -> None:
    world = make_world()
    text = Text(numbers(16))
    world.serve(text, snapshots=lambda position: position == 4)
    nodes = list(world.cache.nodes())
    assert world.cache.timed_pins.add_node(nodes[2], until=1.0) == 12
    assert [node.pins for node in listed(world)] == [1, 1, 1, 0]
    assert world.cache.timed_pins.next_end == 1.0
    world.cache.flush()
    assert world.cache.timed_pins.add_node(nodes[2], until=1.0) == 0, "it has left"
    assert world.cache.timed_pins.next_end is None
    world.check()


def test_without_state_layers_the_block_around_a_cut_is_pinned() -> None:
    world = make_world(has_state=False)
    world.serve(Text([10, END_OF_TURN, 11, 12]))
    assert world.cache.pin(Text([10, END_OF_TURN]).keys, until=1.0) == 2
    assert world.cache.pin(Text([10, END_OF_TURN, 11]).keys, until=1.0) == 2
    world.check()


def test_pins_are_bounded_by_half_of_the_blocks_and_by_the_budget_of_rows() -> None:
    world = make_world(num_blocks=8, num_snapshot_rows=1)
    wide, small, other = Text(numbers(20)), Text(numbers(9, 50)), Text(numbers(9, 80))
    world.serve(wide, snapshots=lambda position: position == 20)
    assert world.match(Text(numbers(21))).boundary == 20
    assert world.cache.pin(wide.keys, until=1.0) == 0
    world.cache.flush()
    world.serve(small, snapshots=lambda position: position == 8)
    world.serve(other, snapshots=lambda position: position == 8)
    assert world.cache.pin(small.keys, until=1.0) == 8
    assert world.cache.pin(other.keys, until=1.0) == 0
    world.check()
    assert make_world(enabled=False).cache.pin(small.keys, until=1.0) == 0


def test_tenants_share_what_pins_may_hold() -> None:
    """One that holds more gives way to one that holds less, its earliest end first, and no more."""
    world = make_world(num_blocks=32)

    def text(salt: str, number: int) -> Text:
        return Text(numbers(17, 50 * number), salt=salt)

    def pin(salt: str, number: int, until: float) -> int:
        asked = text(salt, number)
        world.serve(asked, snapshots=lambda position: position == 16)
        pinned = world.cache.pin(asked.keys, until=until)
        world.check()
        return pinned

    def holds(salt: str, number: int) -> bool:
        return text(salt, number).keys.block_keys[3] in world.cache.timed_pins._pins

    assert [pin("alice", number, 9.0 - number) for number in range(1, 5)] == [16] * 4
    assert pin("alice", 5, 5.0) == 0, "its own pins never give way"
    assert [pin("bob", number, 2.0) for number in (1, 2)] == [16] * 2
    assert [holds("alice", number) for number in range(1, 5)] == [True, True, False, False]
    assert world.cache.stats.evictions["timed_pin"] == 2
    assert pin("bob", 3, 4.0) == pin("alice", 3, 4.0) == 0, "half each"
    assert pin("bob", 1, 7.0) == 16, "a new end takes no place"


def test_an_owner_of_several_roots_has_one_share() -> None:
    """As a tenant with adapters has: each of them has a root of its own."""
    world = make_world(num_blocks=32)
    owners = {"alice": b"alice", "alice and adapter": b"alice", "bob": b"bob"}

    def pin(salt: str, number: int) -> int:
        asked = Text(numbers(17, 50 * number), salt=salt)
        world.serve(asked, snapshots=lambda position: position == 16)
        pinned = world.cache.pin(asked.keys, until=float(number), owner=owners[salt])
        world.check()
        return pinned

    assert [pin("alice", 1), pin("alice", 2), pin("bob", 3), pin("bob", 4)] == [16] * 4
    assert pin("alice and adapter", 5) == 0
    assert world.cache.timed_pins.lift(lambda each: each.owner == b"alice") == 2
    assert pin("alice and adapter", 5) == 16
    world.check()


def test_a_request_that_runs_alone_takes_pins_back_earliest_end_first() -> None:
    world = make_world(num_blocks=8)
    early, late = Text(numbers(9)), Text(numbers(9, 50))
    for text in (early, late):
        world.serve(text, snapshots=lambda position: position == 8)
    assert world.cache.pin(late.keys, until=2.0) == 8
    assert world.cache.pin(early.keys, until=1.0) == 8
    alone = world.cache.open(None)
    before = world.fingerprint()
    assert not world.cache.grow(alone, 33)
    assert world.fingerprint() == before
    assert world.cache.grow(alone, 22)
    world.check()
    assert world.match(early).boundary == 0 and world.match(late).boundary == 8
    assert world.cache.stats.evictions["timed_pin"] == 1
    assert world.cache.grow(alone, 32)
    world.check()


def test_flushing_takes_pins_along() -> None:
    world, text = make_world(), Text(numbers(9))
    world.serve(text)
    world.cache.pin(text.keys, until=9.0)
    world.cache.flush()
    world.check()
    assert world.cache.free_block_count == 64


# Gauges and listing


def test_usage_adds_up() -> None:
    world, text = make_world(num_live_rows=2, num_snapshot_rows=3), Text(numbers(13))
    world.serve(text, snapshots=lambda position: position == 4)
    run = world.start(Text(numbers(9, 60)))
    assert run is not None
    world.cache.reserve_snapshot(run.lease, 8, "x")
    usage = world.cache.usage
    assert (usage.blocks, usage.free_blocks, usage.cached_blocks, usage.nodes) == (64, 58, 3, 3)
    assert usage.rows == {"free": 2, "live": 1, "reserved": 1, "ready": 1, "private": 0}
    assert world.cache.available_block_count == 61


def test_the_listing_shows_nodes_parents_first() -> None:
    world = make_world(block_bytes=100, snapshot_bytes=1000)
    text = Text([10, END_OF_TURN], Image("cat", 4), numbers(7))
    world.serve(text, snapshots=lambda position: position == 6)
    world.serve(text)
    everything = listed(world)
    assert len(everything) == 5
    by_end = {(node.end, node.tail): node for node in everything}
    tail = by_end[6, True]
    assert (tail.snapshot, tail.snapshot_hits, tail.start) == ("test", 1, 4)
    assert tail.num_bytes == 50 + 1000 + text.experts(4, 6).nbytes
    assert tail.parent == by_end[4, False].key
    cat = MediaInfo(2, 4, "image", text.keys.span_hashes[0].hex()[:16])
    assert by_end[4, False].media == (cat,) and not by_end[12, False].media
    seen = set()
    for node in everything:
        assert node.parent == text.root.hex() or node.parent in seen
        seen.add(node.key)


# The check


@pytest.mark.parametrize("asked", [0, 1, 5])
def test_a_check_ends_when_it_is_wanted(asked: int) -> None:
    """It is asked for every pass over some hundred nodes, and finds no fault before it ends."""
    world = make_world(num_blocks=400)
    for first in range(10, 60):
        world.serve(Text(numbers(13, first)))
    count = itertools.count()
    assert world.cache.check(lambda: next(count) == asked) is False
    assert next(count) == asked + 1
    assert world.cache.check() is True


def test_a_check_asks_often() -> None:
    world = make_world(num_blocks=1200)
    few = num_questions(world)
    for first in range(10, 310):
        world.serve(Text(numbers(9, first)))
    nodes = len(list(world.cache.nodes()))
    assert nodes >= 600
    assert num_questions(world) >= few + 6 * (nodes // 256)


def num_questions(world: World) -> int:
    count = itertools.count()
    assert world.cache.check(lambda: next(count) < 0)
    return next(count)


# Bounds


class Thing:
    def __init__(self) -> None:
        self.ticket = 0


def test_the_heap_orders_replaces_and_withdraws() -> None:
    heap: LazyHeap[Thing] = LazyHeap()
    low, high = Thing(), Thing()
    heap.push(high, (1, 0.0, 0))
    heap.push(low, (0, 9.0, 9))
    assert heap.peek() == ((0, 9.0, 9), low)
    heap.push(low, (1, 1.0, 0))
    assert heap.peek() == ((1, 0.0, 0), high) and len(heap) == 2
    heap.discard(high)
    heap.discard(high)
    assert heap.peek() == ((1, 1.0, 0), low) and len(heap) == 1
    heap.discard(low)
    assert heap.peek() is None and len(heap) == 0


def test_dead_heap_entries_stay_bounded() -> None:
    heap: LazyHeap[Thing] = LazyHeap()
    things = [Thing() for _ in range(10)]
    for turn in range(5000):
        heap.push(things[turn % 10], (0, float(turn), 0))
        assert len(heap._entries) <= 2 * len(heap) + 65
    assert len(heap) == 10


def test_bookkeeping_stays_below_two_kilobytes_a_block() -> None:
    """100 000 blocks of bookkeeping in 200 MB; here a tenth of it, keys included."""
    num_blocks, size = 10_000, 64
    tracemalloc.start()
    try:
        config = CacheConfig(num_blocks, size, num_live_rows=1, num_snapshot_rows=200)
        cache = PrefixCache(config)
        for first in range(10):
            ids = [(first * 7 + i * i) % 1000 for i in range(num_blocks // 10 * size)]
            keys = PromptKeys(bytes(32), ids, block_size=size)
            lease = cache.open(None)
            assert cache.take_row(lease) and cache.grow(lease, len(keys))
            for position in range(size, len(keys), 50 * size):
                cache.reserve_snapshot(lease, position, "interval")
            cache.commit(lease, keys, len(keys), exact_until=len(keys))
            cache.close(lease)
        del keys, ids
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cache.usage.nodes == num_blocks
    assert used < 2000 * num_blocks


def test_no_clock_no_randomness_no_tensors() -> None:
    """Order comes from a counter, so that a seed replays a run."""
    folder = Path(vlm_serve.cache.prefix_cache.__file__).parent
    imported = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                imported.add(node.module.split(".")[0])
    assert not imported & {"time", "datetime", "random", "secrets", "torch", "threading"}
    code = "import sys, vlm_serve.cache.prefix_cache; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_blocks": 0},
        {"block_size": 0},
        {"num_live_rows": 0},
        {"num_snapshot_rows": -1},
        {"min_snapshot_gain": 0},
        {"block_bytes": 0},
        {"ghost_entries": -1},
    ],
)
def test_impossible_sizes_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        make_world(**wrong)
