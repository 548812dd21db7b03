"""What comes up from a lower tier is published like computed content, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from cache_texts import Image, Text
from cache_world import World, make_world

from vlm_serve.cache.matching import key_at
from vlm_serve.cache.tier_fetching import Arrival, Destinations, adopt
from vlm_serve.cache.tiers.entry import EntryId, Kind, Origin

BLOCK = 4
TEXT = Text(list(range(10, 30)), Image("cat", 6), list(range(50, 60)))
PICTURE_END = 26
ORIGIN = Origin(bytes(32))


def arrival(boundary: int, *, exact_until: int | None = None) -> Arrival:
    """All that TEXT needs up to a boundary."""
    keys = {key_at(TEXT.keys, cut) for cut in TEXT.keys.cuts if cut <= boundary}
    exact = boundary if exact_until is None else exact_until
    return Arrival(boundary, dict.fromkeys(keys, b""), b"", exact)


def fill(world: World, boundary: int) -> tuple[list[Destinations], Callable[[Destinations], None]]:
    """What was written where, and a function that writes what a computation would have left."""
    told: list[Destinations] = []
    ends = {key_at(TEXT.keys, cut): cut for cut in TEXT.keys.cuts}

    def write(places: Destinations) -> None:
        told.append(places)
        for key, block in places.blocks.items():
            start = (ends[key] - 1) // BLOCK * BLOCK
            world.kv[block][: ends[key] - start] = TEXT.digests[start + 1 : ends[key] + 1]
        world.rows[places.row] = TEXT.digests[boundary]
        for key in (*places.blocks, *key_path(boundary)):
            world.nodes[key] = TEXT.digests[ends[key]]
        world.snapshots[key_at(TEXT.keys, boundary)] = TEXT.digests[boundary]

    return told, write


def key_path(boundary: int) -> list[bytes]:
    """Keys of the full blocks up to a boundary."""
    return TEXT.keys.block_keys[: boundary // BLOCK]


@pytest.mark.parametrize("boundary", [PICTURE_END, 32])
def test_adopted_content_is_found(boundary: int) -> None:
    """At a tail and at the end of a block."""
    world = make_world()
    told, write = fill(world, boundary)
    assert adopt(world.cache, TEXT.keys, arrival(boundary), write)
    world.cache.check()
    assert len(told[0].blocks) == -(-boundary // BLOCK)
    match = world.cache.match(TEXT.keys, limit=boundary)
    assert match.boundary == boundary and match.exact
    # The world compares all that a hit reads with what must be there.
    assert world.serve(TEXT).boundary == boundary
    world.cache.flush()
    world.cache.check()


def test_what_is_there_already_is_not_asked_for() -> None:
    world = make_world()
    world.serve(TEXT)

    def never(places: Destinations) -> None:
        raise AssertionError("nothing is missing")

    assert adopt(world.cache, TEXT.keys, arrival(32), never)


def test_nothing_is_published_if_something_is_missing() -> None:
    world = make_world()
    _, write = fill(world, 32)
    complete = arrival(32)
    for lacking in [
        replace(complete, state=None),
        replace(complete, kv={key: b"" for key in complete.kv if key != TEXT.keys.block_keys[3]}),
    ]:
        assert not adopt(world.cache, TEXT.keys, lacking, write)
        world.cache.check()
        assert world.cache.usage.nodes == 0
    assert world.cache.free_block_count == world.config.num_blocks


def test_nothing_is_held_if_copying_fails() -> None:
    world = make_world()

    def broken(places: Destinations) -> None:
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        adopt(world.cache, TEXT.keys, arrival(32), broken)
    world.cache.check()
    assert world.cache.free_block_count == world.config.num_blocks
    assert world.cache.usage.nodes == 0 and world.cache.usage.rows["reserved"] == 0


def test_no_room_is_no_error() -> None:
    world = make_world(num_blocks=4)
    _, write = fill(world, 32)
    assert not adopt(world.cache, TEXT.keys, arrival(32), write)
    world.cache.check()


def test_provenance_comes_up_too() -> None:
    world = make_world()
    _, write = fill(world, 32)
    made = arrival(32, exact_until=16)
    assert adopt(world.cache, TEXT.keys, made, write)
    assert [node.exact for node in world.cache.nodes()] == [True] * 4 + [False] * 4
    assert not world.cache.match(TEXT.keys, limit=32).exact


def test_lower_tiers_are_asked_for_what_the_device_lacks() -> None:
    world = make_world(min_snapshot_gain=1)
    world.serve(Text(list(range(10, 30))))
    match = world.cache.match(TEXT.keys, limit=35)
    assert match.boundary == 20
    below = {
        EntryId(Kind.KV, TEXT.keys.block_keys[5]): "disk",
        EntryId(Kind.KV, TEXT.keys.tails[PICTURE_END]): "host",
        EntryId(Kind.STATE, TEXT.keys.tails[PICTURE_END]): "disk",
    }
    question = world.cache.tier_query(TEXT.keys, match, limit=35, origin=ORIGIN)
    assert question is not None and set(below) <= {*question.states(), *question.kv()}
    assert EntryId(Kind.KV, TEXT.keys.block_keys[4]) not in question.kv(), "the device has it"
    found = question.choose(below)
    assert found is not None
    assert found.boundary == PICTURE_END
    assert set(found.needed) == set(below)
    assert found.segments == ((20, 24, "disk"), (24, 26, "host"))
    for missing in below:
        rest = {key: tier for key, tier in below.items() if key != missing}
        assert question.choose(rest) is None
    shorter = world.cache.tier_query(TEXT.keys, match, limit=25, origin=ORIGIN)
    assert shorter is None or shorter.choose(below) is None


def test_nothing_is_asked_where_nothing_could_be_gained() -> None:
    world = make_world(min_snapshot_gain=2)
    world.serve(TEXT)
    match = world.cache.match(TEXT.keys, limit=35)
    assert match.boundary == 32
    assert world.cache.tier_query(TEXT.keys, match, limit=35, origin=ORIGIN) is None
    assert (
        make_world(enabled=False).cache.tier_query(TEXT.keys, match, limit=35, origin=ORIGIN)
        is None
    )


def test_a_tail_on_the_device_is_not_asked_for_again() -> None:
    world = make_world(min_snapshot_gain=1)
    world.serve(TEXT, snapshots=lambda position: position == 20)
    match = world.cache.match(TEXT.keys, limit=27)
    assert (match.boundary, match.kv_boundary) == (20, PICTURE_END)
    question = world.cache.tier_query(TEXT.keys, match, limit=27, origin=ORIGIN)
    state = EntryId(Kind.STATE, TEXT.keys.tails[PICTURE_END])
    assert question is not None
    found = question.choose({state: "disk"})
    assert found is not None and found.needed == (state,)
    assert found.segments == ((20, 24, "disk"), (24, 26, "disk"))
