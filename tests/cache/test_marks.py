"""Cut points that requests bring: who hits at a mark, and what is remembered of it."""

from __future__ import annotations

import pytest
from cache_texts import Image, Text
from cache_world import make_world

from vlm_serve.cache.marks import KnownMarks
from vlm_serve.cache.matching import shared_cut
from vlm_serve.cache.placement import plan_snapshots
from vlm_serve.cache.tiers.entry import EntryId, Kind, Origin
from vlm_serve.preprocess.identity.prompt import Prompt

CAT = Image("cat", 6)
BEGINNING = list(range(10, 21))
"""Eleven tokens: two blocks, and three tokens of the third one."""


@pytest.mark.parametrize("asks", [(), (11,), (5,), (11, 3)])
def test_a_hit_ends_at_the_mark_whoever_asks(asks: tuple[int, ...]) -> None:
    """Hit with the mark, without it, and once an agent has moved it."""
    world = make_world()
    world.serve(Text(BEGINNING, [5] * 7, marks=[11]))
    match = world.serve(Text(BEGINNING, [6] * 9, marks=asks))
    assert (match.boundary, match.kv_boundary) == (11, 11)


def test_a_mark_behind_a_picture_and_one_before_it() -> None:
    world = make_world()
    world.serve(Text(BEGINNING, CAT, [7, 8, 9], [5] * 4, marks=[11, 19]))
    assert world.serve(Text(BEGINNING, CAT, [7, 8, 4], [6] * 5)).boundary == 19
    assert world.serve(Text(BEGINNING, Image("dog", 6), [7, 8, 9], [6] * 5)).boundary == 11
    assert world.serve(Text(BEGINNING, CAT, [7, 7, 7], [6] * 5)).boundary == 17


def test_a_mark_is_known_to_its_tenant_alone() -> None:
    world = make_world()
    world.serve(Text([5] * 3, [6] * 9, marks=[3]))
    assert world.serve(Text([5] * 3, [7] * 9)).boundary == 3
    assert world.serve(Text([5] * 3, [7] * 9, salt="tenant")).boundary == 0


def test_a_mark_at_a_cut_point_brings_none() -> None:
    keys = Text(BEGINNING, CAT, marks=[8, 17]).keys
    assert keys.marks == (8, 17) and not keys.brought
    assert keys.cuts == Text(BEGINNING, CAT).keys.cuts


def test_marks_take_the_first_snapshots() -> None:
    text = Text(list(range(10, 60)), marks=[9, 30])
    prompt = Prompt(tuple(text.token_ids), None, 0, text.keys)  # type: ignore[arg-type]
    plan = plan_snapshots(prompt, start=0, junction=0, interval=8, min_gain=8, max_new=3)
    assert plan == ((30, "mark"), (9, "mark"), (48, "prompt_end"))
    plan = plan_snapshots(prompt, start=9, junction=0, interval=64, min_gain=8)
    assert plan == ((30, "mark"), (48, "prompt_end")), "the other one has been reused"


def test_a_follower_meets_its_leader_at_the_leaders_mark() -> None:
    leader, follower = Text(BEGINNING, [5] * 7, marks=[11]).keys, Text(BEGINNING, [6] * 7).keys
    assert shared_cut(follower, leader, least=1, limit=17) == 8
    follower.bring_from(leader)
    assert shared_cut(follower, leader, least=1, limit=17) == 11
    other = Text(BEGINNING[:10], [6] * 8).keys
    other.bring_from(leader)
    assert shared_cut(other, leader, least=1, limit=17) == 8 and not other.brought


def test_a_leader_leaves_nothing_at_a_mark_that_is_its_followers_alone() -> None:
    """A leader computes no state there, also where both go on alike behind the mark."""
    leader, follower = (Text(BEGINNING, [5] * 7, marks=marks).keys for marks in ((), (11,)))
    follower.bring_from(leader)
    assert shared_cut(follower, leader, least=1, limit=11) == 8
    assert shared_cut(follower, leader, least=1, limit=17) == 16
    leader.mark([11])
    assert shared_cut(follower, leader, least=1, limit=11) == 11


def test_what_a_lower_tier_has_at_a_mark_is_asked_for_without_it() -> None:
    """A mark outlives its node, so that the key of what was evicted is still found."""
    world, origin = make_world(), Origin(bytes(32))
    marked = Text(BEGINNING, [5] * 7, marks=[11])
    world.serve(marked)
    world.cache._evictor.evict_everything()
    assert world.cache.usage.nodes == 0
    text = Text(BEGINNING, [6] * 9)
    match = world.match(text)
    query = world.cache.tier_query(text.keys, match, limit=19, origin=origin)
    assert match.boundary == 0 and query is not None
    below = {
        *(EntryId(Kind.KV, key) for key in text.keys.block_keys[:2]),
        EntryId(Kind.KV, marked.keys.tails[11]),
        EntryId(Kind.STATE, marked.keys.tails[11]),
    }
    below = {origin.id(each.kind, each.key) for each in below}
    assert below <= {*query.states(), *query.kv()}
    deeper = query.choose(dict.fromkeys(below, "host"))
    assert deeper is not None and deeper.boundary == 11
    world.cache.flush()
    assert not len(world.cache.ledger.marks)


def test_the_memory_of_marks_is_bounded() -> None:
    marks = KnownMarks(most=3)
    texts = [Text([first, 6, 7], [8] * 3, marks=[2, 3]) for first in range(10, 15)]
    for text in texts:
        for cut in (2, 3, 3):
            marks.add(text.keys, cut)
        assert len(marks) <= 3
    asked = [Text(text.token_ids[:3], [9] * 3).keys for text in texts]
    assert [sorted(marks.cuts(keys)) for keys in asked] == [[], [], [], [3], [2, 3]]
    marks.clear()
    assert not marks.cuts(asked[-1])


def test_a_prompt_that_continues_a_known_one_does_not_take_its_marks() -> None:
    """Marks would otherwise be cut points of every tenant's later prompts without one."""
    marked = Text(BEGINNING, [5] * 7, marks=[3, 11]).keys
    plain, moved = Text(BEGINNING, [5] * 12), Text(BEGINNING, [5] * 12, marks=[6])
    for text in (plain, moved):
        again = type(marked)(
            text.root,
            text.token_ids,
            block_size=4,
            end_of_turn_ids=(1,),
            known=marked,
            shared=18,
            marks=text.keys.marks,
        )
        assert (again.cuts, again.brought) == (text.keys.cuts, text.keys.brought)
        assert [*again.tails.items()] == [*text.keys.tails.items()]


def test_a_pin_of_a_mark_ends_there() -> None:
    """Keep nothing behind a mark with it, and pin nothing that does not fit."""
    world = make_world(num_blocks=8, num_snapshot_rows=2)
    text = Text(BEGINNING, [5] * 7, marks=[3, 11])
    world.serve(text)
    assert world.cache.pin(text.keys, 1.0, limit=11) == 11
    (pin,) = world.cache.timed_pins.pins
    assert [node.end for node in pin.nodes] == [4, 8, 11]
    assert pin.snapshot is not None and pin.snapshot.position == 11
    assert world.cache.pin(text.keys, 1.0, limit=3) == 3
    assert world.cache.pin(text.keys, 1.0, limit=8) == 0, "there are two rows for pins"
    world.check()
    assert world.cache.timed_pins.expire(now=1.0) == 2
