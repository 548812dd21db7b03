"""Which boundary a prompt gets (docs/architecture.md#cut-points-and-matching)."""

from __future__ import annotations

import pytest
from cache_texts import END_OF_TURN, Image, Text
from cache_world import make_world

BLOCK = 4
CAT, DOG = Image("cat", 6), Image("dog", 6)


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 12, 13])
def test_an_identical_prompt_hits_all_but_its_last_tokens(length: int) -> None:
    world, text = make_world(), Text(numbers(length))
    assert world.serve(text).boundary == 0
    deepest = (length - 1) // BLOCK * BLOCK
    match = world.serve(text)
    assert match.boundary == deepest
    assert match.reason == ("full" if deepest else "below_granularity")
    # A prompt that ends with a block finds all its KV, and still starts before its last token.
    assert match.kv_tokens == length // BLOCK * BLOCK


def test_an_empty_prompt_matches_nothing() -> None:
    match = make_world().match(Text([]), limit=0)
    assert (match.boundary, match.reason) == (0, "below_granularity")


def test_at_least_one_token_is_computed() -> None:
    world, text = make_world(), Text(numbers(8))
    with pytest.raises(AssertionError, match="at least one token"):
        world.cache.match(text.keys, limit=8)


def test_a_full_length_hit_does_not_restore_the_state_of_the_last_token() -> None:
    """The snapshot at the prompt's very end is there, for longer prompts only."""
    world = make_world()
    world.serve(Text(numbers(8)))
    assert world.match(Text(numbers(8))).boundary == 4
    assert world.match(Text(numbers(9))).boundary == 8


@pytest.mark.parametrize("before", range(1, 9))
@pytest.mark.parametrize("size", [3, 4, 6, 9])
def test_same_picture_other_question_hits_to_the_end_of_the_picture(before: int, size: int) -> None:
    """Wherever the picture ends in a block: a tail covers it."""
    world, picture = make_world(), Image("cat", size)
    start, end = numbers(before), before + size
    world.serve(Text(start, picture, numbers(7, 50)))
    match = world.serve(Text(start, picture, numbers(9, 70)))
    assert match.boundary == end
    # And again, the hit being the one who copied the tail's rows.
    assert world.serve(Text(start, picture, numbers(5, 90))).boundary == end


def test_another_picture_under_identical_text_hits_nothing_past_its_start() -> None:
    world, start = make_world(), [10, END_OF_TURN]
    world.serve(Text(start, CAT, numbers(7)))
    match = world.serve(Text(start, DOG, numbers(7)))
    assert (match.boundary, match.kv_boundary, match.reason) == (2, 2, "media_changed")


def test_text_first_then_the_same_text_with_a_picture() -> None:
    world, start = make_world(), numbers(8)
    world.serve(Text(start, numbers(8, 50)))
    match = world.serve(Text(start, CAT, numbers(8, 50)))
    assert match.boundary == 8
    assert world.serve(Text(start, CAT, numbers(3, 60))).boundary == 14


def test_placeholder_tokens_without_a_picture_bind_no_medium() -> None:
    world = make_world()
    world.serve(Text([10, 11], CAT, numbers(7)))
    literal = Text([10, 11], [3] * CAT.size, numbers(7))
    assert world.match(literal).boundary == 0


def test_two_adjacent_pictures_clamp_to_the_end_of_the_first() -> None:
    world = make_world()
    world.serve(Text([10], CAT, DOG, numbers(8)))
    match = world.serve(Text([10], CAT, Image("cow", 6), numbers(8)))
    assert match.boundary == 7
    match = world.serve(Text([10], DOG, DOG, numbers(8)))
    assert match.boundary == 0


def test_the_same_picture_twice_and_at_another_offset() -> None:
    world = make_world()
    world.serve(Text([10], CAT, [11], CAT, numbers(8)))
    assert world.match(Text([10], CAT, [11], CAT, [60])).boundary == 14
    assert world.match(Text([10], CAT, numbers(9, 60))).boundary == 7
    assert world.match(Text([10, 11], CAT, numbers(9, 60))).boundary == 0


def test_a_match_never_ends_inside_a_span() -> None:
    world, text = make_world(), Text([10, 11], Image("cat", 30), numbers(6))
    world.serve(text)
    match = world.match(text, limit=31)
    assert (match.boundary, match.kv_boundary) == (0, 0)
    assert match.kv_tokens == 36


def test_the_snapshot_of_a_tail_inside_a_matched_block_is_used_without_copying() -> None:
    world = make_world()
    text = Text([10, 11, 12], Image("cat", 3), numbers(9))
    world.serve(text, snapshots=lambda position: position == 6)
    run = world.start(text)
    assert run is not None
    assert (run.lease.boundary, run.lease.shared_tokens) == (6, 12)
    assert world.step(run, len(text))
    assert run.lease.copies == ()
    world.check()


def test_without_state_layers_kv_alone_decides() -> None:
    world = make_world(has_state=False)
    world.serve(Text([10, 11, 12], Image("cat", 3), numbers(9)))
    match = world.serve(Text([10, 11, 12], Image("cat", 3), numbers(9)))
    assert (match.boundary, match.snapshot, match.junction) == (12, None, False)
    match = world.serve(Text([10, 11, 12], Image("cat", 3), numbers(9, 50)))
    assert match.boundary == 6 and match.tail is not None


def test_without_state_layers_a_cut_inside_a_matched_block_copies_nothing() -> None:
    world, text = make_world(has_state=False), Text([10, END_OF_TURN, 11, 12])
    world.serve(text)
    match = world.match(text)
    assert (match.boundary, match.kv_tokens) == (2, 4)
    run = world.start(text)
    assert run is not None and run.lease.copies == ()
    assert world.step(run, 4)


def test_disabled_finds_nothing_and_keeps_nothing() -> None:
    world, text = make_world(enabled=False), Text(numbers(9))
    world.serve(text)
    match = world.serve(text)
    assert (match.boundary, match.kv_tokens, match.reason) == (0, 0, "disabled")
    assert world.cache.free_block_count == 64


def test_matching_changes_nothing() -> None:
    world, text = make_world(), Text([10, END_OF_TURN], CAT, numbers(9))
    world.serve(text)
    before = world.fingerprint()
    for limit in range(len(text)):
        world.match(text, limit=limit)
    assert world.fingerprint() == before


def test_a_stale_match_is_refused() -> None:
    world, text = make_world(), Text(numbers(9))
    world.serve(text)
    match = world.match(text)
    world.cache.flush()
    with pytest.raises(AssertionError, match="stale"):
        world.cache.open(match)


def test_tenants_share_nothing() -> None:
    world, text = make_world(), Text(numbers(9), salt="one")
    world.serve(text)
    other = world.serve(Text(numbers(9), salt="two"))
    assert (other.boundary, other.kv_tokens, other.reason) == (0, 0, "salt")
    assert world.match(text).boundary == 8


def test_exactness_follows_every_block_that_is_read() -> None:
    world, text = make_world(), Text(numbers(6))
    run = world.start(text)
    assert run is not None
    world.step(run, 6)
    for token in (20, 21, 22, 23):
        text.append(token)
        world.step(run, len(text))
    world.close(run)
    assert world.match(text, limit=4).exact is False  # the block after it is read too
    assert world.match(Text(numbers(6), [60, 61, 62])).exact
    follower = Text(numbers(6), [20, 21, 22, 23], [60, 61, 62])
    match = world.serve(follower)
    assert (match.boundary, match.exact) == (8, False)
    # What is computed on top of a decode-made prefix is not exact either.
    longer = Text(numbers(6), [20, 21, 22, 23], [60, 61, 62, 63, 64])
    assert world.match(longer).exact is False


@pytest.mark.parametrize("has_state", [True, False])
def test_the_deepest_boundary_is_what_a_longer_prompt_matches(has_state: bool) -> None:
    world = make_world(has_state=has_state)
    tokens = [10, END_OF_TURN, 11, 12, 13, 14]
    text = Text(tokens)
    for known in (False, True):
        if known:
            world.serve(text)
        snapshots = world.cache.snapshot_positions(text.keys, len(text))
        deepest = world.cache.deepest_boundary(text.keys, len(text), snapshots)
        assert bool(deepest) is known
        assert deepest == world.match(Text([*tokens, 15, 16])).boundary


@pytest.mark.parametrize(("snapshot_bytes", "junction"), [(99, True), (100, False)])
def test_a_snapshot_smaller_than_a_block_pays_from_one_block_on(
    snapshot_bytes: int, junction: bool
) -> None:
    world = make_world(block_bytes=100, snapshot_bytes=snapshot_bytes)
    world.serve(Text(list(range(10, 30))), snapshots=lambda position: False)
    match = world.match(Text([10, 11, 12, 13, 5, 6]))
    assert (match.kv_boundary, match.state_boundary, match.junction) == (4, 0, junction)
