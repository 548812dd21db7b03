"""Events of the cache: their order, who may raise, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
from cache_texts import Image, Text
from cache_world import World, make_world

from vlm_serve.cache.records import Hit, Node

TEXT = Text(list(range(10, 19)))
KINDS = ("node_added", "node_evicted", "snapshot_ready", "snapshot_evicted", "hit")


def told_of(world: World) -> list[tuple[str, bytes]]:
    """What is told from now on, with the key of what it is about."""
    told: list[tuple[str, bytes]] = []
    events = world.cache.events
    events.node_added.subscribe(lambda node: told.append(("node_added", node.key)))
    events.node_evicted.subscribe(lambda node: told.append(("node_evicted", node.key)))
    events.hit.subscribe(lambda hit: told.append(("hit", hit.key)))
    for kind in ("snapshot_ready", "snapshot_evicted"):
        getattr(events, kind).subscribe(
            lambda snapshot, kind=kind: told.append((kind, snapshot.node.key))
        )
    return told


def admit(world: World, text: Text) -> None:
    """A recorded request in one slice."""
    match = world.match(text)
    run = world.start(text)
    assert run is not None
    world.cache.record(run.lease, match, len(text))
    assert world.step(run, len(text))
    world.close(run)


def test_events_come_in_order() -> None:
    world = make_world()
    told = told_of(world)
    admit(world, TEXT)
    world.cache.flush()
    first, second = TEXT.keys.block_keys[:2]
    assert told == [
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


def test_a_hit_names_what_was_used() -> None:
    world = make_world(has_state=False)
    text = Text([10, 11], Image("cat", 8), [12, 13])
    admit(world, text)
    hits: list[Hit] = []
    world.cache.events.hit.subscribe(hits.append)
    admit(world, text)
    (hit,) = hits
    assert hit.boundary == 10 and hit.prompt_tokens == 12
    assert (hit.key, hit.root) == (text.keys.tails[10], text.keys.root)


def test_a_failed_step_is_not_told() -> None:
    world = make_world()
    told = told_of(world)
    run = world.start(TEXT)
    assert run is not None
    world.cache.record(run.lease, world.match(TEXT), len(TEXT))
    world.fail(run, len(TEXT))
    assert not told and world.cache.stats.requests == 0


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
        block = world.cache.ledger.blocks[node.block.id]
        seen.append(node in block.nodes and block.id not in world.cache.ledger.blocks.free_ids)

    world.cache.events.node_evicted.subscribe(evicted)
    world.serve(TEXT)
    world.serve(Text(list(range(30, 42))))
    assert seen and all(seen)


def test_nothing_is_made_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(num_blocks=4)
    world.cache.events.hit.unsubscribe(world.cache.stats._hit)
    never = pytest.fail
    monkeypatch.setattr("vlm_serve.cache.prefix_cache.Hit", never)
    for first in range(3):
        admit(world, Text(list(range(20 * first + 100, 20 * first + 109))))
    assert world.cache.stats.evictions and not world.cache.stats.requests
    world.check()
