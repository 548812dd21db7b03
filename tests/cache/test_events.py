"""Events of the cache: their order, their numbers, who may raise, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
from cache_texts import Image, Text
from cache_world import World, make_world

from vlm_serve.cache.events import EventLog
from vlm_serve.cache.records import Node

TEXT = Text(list(range(10, 19)))
KINDS = ("node_added", "node_evicted", "snapshot_ready", "snapshot_evicted", "hit")


def logged(world: World, limit: int = 100) -> EventLog:
    return EventLog(world.cache.events, limit)


def admit(world: World, text: Text) -> None:
    """A recorded request in one slice."""
    match = world.match(text)
    run = world.start(text)
    assert run is not None
    world.cache.record(run.lease, match, len(text))
    assert world.step(run, len(text))
    world.close(run)


def test_events_come_in_order_and_are_numbered() -> None:
    world = make_world()
    log = logged(world)
    admit(world, TEXT)
    world.cache.flush()
    told = log.since(0)
    assert told is not None and [event.number for event in told] == list(range(1, log.number + 1))
    first, second = TEXT.keys.block_keys[:2]
    assert [(event.kind, event.key) for event in told] == [
        ("hit", b""),
        ("node_added", first),
        ("node_added", second),
        ("snapshot_ready", first),
        ("snapshot_ready", second),
        ("snapshot_evicted", second),
        ("node_evicted", second),
        ("snapshot_evicted", first),
        ("node_evicted", first),
    ]
    assert told[2].facts == {"parent": first, "start": 4, "end": 8, "exact": True, "media": False}
    assert log.since(7) == told[7:] and log.since(9) == ()


def test_a_hit_names_what_was_used() -> None:
    world = make_world(has_state=False)
    text = Text([10, 11], Image("cat", 8), [12, 13])
    admit(world, text)
    log = logged(world)
    admit(world, text)
    told = log.since(0)
    assert told is not None
    (hit,) = (event for event in told if event.kind == "hit")
    assert hit.facts["boundary"] == 10 and hit.facts["prompt_tokens"] == 12
    assert hit.key == text.keys.tails[10]


def test_a_reader_who_falls_behind_is_told_so() -> None:
    world = make_world()
    log = logged(world, limit=4)
    assert log.since(0) == () and log.since(1) is None, "not a number of this log"
    for first in range(3):
        world.serve(Text(list(range(20 * first + 100, 20 * first + 109))))
    assert log.number == 12
    assert log.since(7) is None and log.since(0) is None and log.since(13) is None
    told = log.since(8)
    assert told is not None and [event.number for event in told] == [9, 10, 11, 12]


def test_a_failed_step_is_not_told() -> None:
    world = make_world()
    log = logged(world)
    run = world.start(TEXT)
    assert run is not None
    world.cache.record(run.lease, world.match(TEXT), len(TEXT))
    world.fail(run, len(TEXT))
    assert log.number == 0 and world.cache.stats.requests == 0


def test_a_subscriber_that_raises_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    world = make_world(num_blocks=4, num_live_rows=1, num_snapshot_rows=1)
    heard: list[bytes] = []

    def broken(_: Any) -> None:
        raise RuntimeError("injected")

    events = world.cache.events
    for topic in (getattr(events, kind) for kind in (*KINDS, "block_freed", "row_freed")):
        topic.subscribe(broken)
    events.node_evicted.subscribe(lambda node: heard.append(node.key))
    for first in range(3):
        run = world.start(Text(list(range(20 * first + 100, 20 * first + 109))))
        assert run is not None and world.step(run, 9)
        world.close(run)
        world.cache.check()
    assert heard, "the others are told all the same"
    assert events.failures == events.node_evicted.failures + sum(
        topic.failures for name, topic in vars(events).items() if name != "node_evicted"
    )
    assert events.node_evicted.failures == len(heard)
    assert "a subscriber of the cache's events raised" in caplog.text


def test_an_eviction_is_told_while_the_content_is_still_there() -> None:
    world = make_world(num_blocks=4, num_live_rows=1, num_snapshot_rows=0)
    seen: list[bool] = []

    def evicted(node: Node) -> None:
        block = world.cache._ledger.blocks[node.block.id]
        seen.append(node in block.nodes and block.id not in world.cache._ledger.blocks.free_ids)

    world.cache.events.node_evicted.subscribe(evicted)
    world.serve(TEXT)
    world.serve(Text(list(range(30, 42))))
    assert seen and all(seen)


def test_nothing_is_made_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(num_blocks=4)
    world.cache.events.hit.unsubscribe(world.cache.stats._hit)
    never = pytest.fail
    monkeypatch.setattr("vlm_serve.cache.events.Event", never)
    monkeypatch.setattr("vlm_serve.cache.prefix_cache.Hit", never)
    for first in range(3):
        admit(world, Text(list(range(20 * first + 100, 20 * first + 109))))
    assert world.cache.stats.evictions and not world.cache.stats.requests
    world.check()
