"""Every miss has a reason (docs/architecture.md#reasons)."""

from __future__ import annotations

from cache_texts import END_OF_TURN, Image, Text
from cache_world import World, make_world

from vlm_serve.cache.ledger import GhostMemory
from vlm_serve.cache.logprobs import WantedRows


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def reason(world: World, text: Text, limit: int | None = None) -> str:
    return world.match(text, limit).reason


def test_cold_then_full() -> None:
    world, text = make_world(), Text(numbers(10))
    assert reason(world, text) == "cold"
    world.serve(text)
    assert reason(world, text) == "full"
    assert reason(world, Text(numbers(10), numbers(9, 90))) == "unseen"
    assert reason(world, Text(numbers(3), numbers(9, 90))) == "cold"


def test_what_follows_the_last_that_was_ever_seen_is_unseen() -> None:
    """Cold is only what reuses nothing."""
    world = make_world()
    world.serve(Text([10, END_OF_TURN], Image("cat", 4), numbers(7)))
    match = world.match(Text([10, END_OF_TURN], Image("cat", 4), numbers(9, 50)))
    assert (match.boundary, match.reason) == (6, "unseen")


def test_below_granularity() -> None:
    world = make_world()
    assert reason(world, Text(numbers(4))) == "below_granularity"
    assert reason(world, Text(numbers(5))) == "cold"
    assert reason(world, Text([10, END_OF_TURN, 11])) == "cold"


def test_prompt_logprobs_limit_the_boundary() -> None:
    world, text = make_world(), Text(numbers(13))
    world.serve(text)
    for first in (1, 7, 12):
        match = world.match(text, wants=WantedRows(first, 0))
        assert (match.boundary, match.reason) == ((first - 1) // 4 * 4, "prompt_logprobs")


def test_state_never_taken_and_state_evicted() -> None:
    world, text = make_world(num_snapshot_rows=1, num_live_rows=1), Text(numbers(13))
    world.serve(text, snapshots=lambda position: False)
    assert reason(world, text) == "no_snapshot"
    world.serve(text, snapshots=lambda position: position == 12)
    assert reason(world, text) == "full"
    for first in (30, 60):
        world.serve(Text(numbers(17, first)))
    assert reason(world, text) == "snapshot_evicted"


def test_kv_evicted() -> None:
    world, text = make_world(num_blocks=5), Text(numbers(12))
    world.serve(text)
    world.serve(Text(numbers(20, 40)))
    assert reason(world, text) == "kv_evicted"
    world.cache.flush()
    assert reason(world, text) == "cold"


def test_in_flight() -> None:
    world, text = make_world(), Text(numbers(12))
    run = world.start(text, first=4)
    assert run is not None
    assert reason(world, text) == "in_flight"
    world.step(run, 4)
    assert reason(world, text) == "in_flight"
    world.step(run, 12)
    assert reason(world, text) == "full"
    world.close(run)
    other = world.start(Text(numbers(12, 50)))
    assert other is not None
    world.close(other)
    assert reason(world, Text(numbers(12, 50))) == "cold"


def test_span_clamp() -> None:
    """The KV that matched ends inside a picture, and no earlier reason applies."""
    world = make_world()
    text = Text(numbers(5), Image("cat", 20), numbers(6))
    run = world.start(text, first=12)
    assert run is not None
    world.step(run, 12)
    world.close(run)
    match = world.match(text)
    assert (match.kv_tokens, match.boundary, match.reason) == (12, 4, "span_clamp")


def test_media_changed_needs_a_sibling_with_a_picture_at_the_same_place() -> None:
    world = make_world()
    world.serve(Text([10, 11], Image("cat", 6), numbers(6)))
    assert reason(world, Text([10, 11], Image("dog", 6), numbers(6))) == "media_changed"
    assert reason(world, Text([10], Image("dog", 6), numbers(6))) == "cold"
    assert reason(world, Text([10, 11], numbers(6))) == "cold"
    world.cache.flush()
    assert reason(world, Text([10, 11], Image("dog", 6), numbers(6))) == "cold"


def film(*names: str) -> list[Image | list[int]]:
    """Temporal patches, a timestamp before each."""
    made: list[Image | list[int]] = []
    for patch, name in enumerate(names):
        made += [[30 + patch], Image(name, 5, patch)]
    return made


def test_a_video_that_goes_on_is_no_other_video() -> None:
    world = make_world()
    world.serve(Text(*film("a", "b"), numbers(9)))
    match = world.match(Text(*film("a", "b", "c"), numbers(9)))
    assert (match.boundary, match.reason) == (12, "media_grown")
    assert reason(world, Text(*film("a", "x", "c"), numbers(9))) == "media_grown"
    assert reason(world, Text(*film("x", "b"), numbers(9))) == "media_changed"
    assert reason(world, Text(*film("a", "b"), numbers(9, 50))) == "unseen"


def test_another_question_behind_a_picture_is_no_other_picture() -> None:
    """The picture and both questions begin in one block."""
    world = make_world()
    world.serve(Text([10], Image("cat", 1), numbers(9)))
    match = world.match(Text([10], Image("cat", 1), numbers(9, 50)))
    assert (match.boundary, match.reason) == (2, "unseen")


def test_experts_missing() -> None:
    world, text = make_world(), Text(numbers(13))
    run = world.start(text, capture=False)
    assert run is not None
    world.step(run, 13)
    world.close(run)
    match = world.match(text, complete=True)
    assert (match.boundary, match.state_boundary, match.reason) == (0, 12, "experts_missing")


def test_the_memory_of_evicted_keys_forgets_the_oldest() -> None:
    ghosts = GhostMemory(2)
    for key in (b"a", b"b", b"a", b"c"):
        ghosts.add(key)
    assert b"a" in ghosts and b"c" in ghosts and b"b" not in ghosts
    ghosts.discard(b"a")
    assert b"a" not in ghosts and len(ghosts) == 1
    nothing = GhostMemory(0)
    nothing.add(b"a")
    assert len(nothing) == 0
