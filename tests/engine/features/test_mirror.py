"""The tree as other threads see it: always the one that there is, in numbered batches."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from cache_texts import Image, Text
from cache_traffic import drive_with, random_world
from cache_world import World, make_world
from tree_follower import Follower

from vlm_serve.cache.records import MediaStart
from vlm_serve.engine.features.mirror import TreeMirror

TEXT = Text(list(range(10, 19)))


def admit(world: World, text: Text) -> None:
    """A recorded request in one slice."""
    match = world.match(text)
    run = world.start(text)
    assert run is not None
    world.cache.record(run.lease, match, len(text))
    assert world.step(run, len(text))
    world.close(run)


def kinds_since(mirror: TreeMirror, number: int) -> list[str]:
    told = mirror.since(number)
    assert told is not None
    return [change.kind for change in told[1]]


@pytest.mark.parametrize("seed", range(40))
def test_random_traffic_is_mirrored(seed: int) -> None:
    """Pins, hits and sizes too, whether the reader follows or reads the whole again."""
    world = random_world(seed)
    follower = Follower(world.cache, limit=[5, 40, 10_000][seed % 3])
    drive_with(world, seed, 150, follower.check)
    assert not world.cache.events.failures


def test_a_step_is_one_batch() -> None:
    world = make_world()
    mirror = TreeMirror(world.cache.events)
    with mirror.following():
        admit(world, TEXT)
        assert mirror.sequence == 0 and not mirror.listing().entries, (
            "nothing before the step's end"
        )
        mirror.publish()
        mirror.publish()
        assert mirror.sequence == 1
        assert kinds_since(mirror, 0) == [
            "hit", "node_added", "node_added", "snapshot_ready", "snapshot_ready",
        ]  # fmt: skip
        assert kinds_since(mirror, 1) == []
        mirror.publish_use()
        assert kinds_since(mirror, 1) == ["pinned", "pinned"]
        mirror.publish_use()
        assert mirror.sequence == 2


def test_nodes_know_their_media_and_tokens() -> None:
    world = make_world()
    mirror = TreeMirror(world.cache.events)
    text = Text([10, 11], Image("cat", 3), Image("dog", 3), [12, 13])
    admit(world, text)
    mirror.publish()
    first, second, *_ = mirror.listing().entries
    cat, dog = text.keys.span_hashes
    assert first.node.media == (MediaStart(2, 3, "image", cat),)
    assert second.node.media == (MediaStart(1, 3, "image", dog),)
    assert first.root == second.root == text.keys.root
    packed = b"".join(token.to_bytes(4, "little") for token in text.token_ids)
    assert first.node.packed_tokens + second.node.packed_tokens == packed[:32]


def test_who_falls_behind_is_told_so() -> None:
    world = make_world(num_blocks=40)
    mirror = TreeMirror(world.cache.events, limit=8)
    with mirror.following():
        for first in range(4):
            world.serve(Text(list(range(20 * first + 100, 20 * first + 109))))
            mirror.publish()
        assert mirror.sequence == 4
        assert mirror.since(0) is None and mirror.since(1) is None and mirror.since(5) is None
        assert mirror.since(2) is not None and mirror.since(4) == (4, ())
        world.cache.flush()  # one batch that is longer than all that is kept
        mirror.publish()
        assert mirror.since(4) is None and mirror.since(5) == (5, ())
    assert mirror.listing().entries == ()


def test_nothing_is_kept_for_nobody() -> None:
    world = make_world()
    mirror = TreeMirror(world.cache.events)
    admit(world, TEXT)
    mirror.publish()
    assert mirror.sequence == 1 and len(mirror.listing().entries) == 2
    assert not world.cache.events.node_used.subscribers
    with mirror.following():
        assert world.cache.events.node_used.subscribers
        assert mirror.since(0) is None, "what happened before was not kept"
        with mirror.following():
            pass
        admit(world, TEXT)
        mirror.publish()
        assert kinds_since(mirror, 1) == ["hit"]
    assert not world.cache.events.node_used.subscribers
    for first in range(3):
        world.serve(Text(list(range(20 * first + 100, 20 * first + 109))))
        mirror.publish()
    assert not mirror._batches and not mirror._used and not mirror._touched
    assert mirror.since(2) is None


def test_a_node_that_has_left_holds_no_rows() -> None:
    """Readers may keep it for as long as they take to send it."""
    world = make_world()
    mirror = TreeMirror(world.cache.events)
    run = world.start(TEXT)
    assert run is not None and world.step(run, len(TEXT))
    world.close(run)
    mirror.publish()
    entries = mirror.listing().entries
    assert any(entry.node.experts is not None for entry in entries)
    world.cache.flush()
    assert all(entry.node.experts is None and entry.node.logprobs is None for entry in entries)


def test_readers_on_other_threads_see_whole_batches() -> None:
    """A child never comes without its parent, whatever the cache's thread does meanwhile."""
    world = make_world(num_blocks=60)
    mirror = TreeMirror(world.cache.events, limit=30)
    ended, wrong = threading.Event(), list[Any]()

    def read() -> None:
        with mirror.following():
            sequence, known = 0, set[bytes]()
            while not ended.is_set():
                told = mirror.since(sequence)
                if told is None:
                    whole = mirror.listing()
                    sequence, known = whole.sequence, {each.node.key for each in whole.entries}
                    parents = {each.node.parent.key for each in whole.entries}
                    roots = {each.root for each in whole.entries}
                    wrong.extend(parents - known - roots)
                    continue
                sequence, changes = told
                for change in changes:
                    if change.kind == "node_added":
                        known.add(change.key)
                    elif change.kind == "node_evicted":
                        known.remove(change.key)

    def watched() -> None:
        try:
            read()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=watched) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(300):
            world.serve(Text([5] * (number % 7), list(range(number % 50, number % 50 + 20))))
            if number % 50 == 49:
                world.cache.flush()
            mirror.publish()
            mirror.publish_use()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not wrong
