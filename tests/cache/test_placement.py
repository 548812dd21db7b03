"""Where snapshots go (docs/architecture.md#state)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from cache_texts import END_OF_TURN, Image, Text
from hypothesis import given
from hypothesis import strategies as st

from vlm_serve.cache.placement import MAX_NEW_SNAPSHOTS, LearnedPlace, plan_snapshots
from vlm_serve.preprocess.identity.keys import PromptKeys

BLOCK = 16


@dataclass
class Marks:
    """A prompt as far as placement looks at it."""

    keys: PromptKeys
    media_ends: tuple[int, ...] = ()
    message_ends: tuple[int, ...] = ()
    system_end: int = 0
    stable_end: int = 0

    def __len__(self) -> int:
        return len(self.keys)


def words(count: int) -> list[int]:
    return [10 + index % 50 for index in range(count)]


def marks(*segments: list[int] | Image, stable_end: int = 0, system: bool = False) -> Marks:
    text = Text(*segments, block_size=BLOCK)
    ends = tuple(i + 1 for i, token in enumerate(text.token_ids) if token == END_OF_TURN)
    media_ends = tuple(span.end for span in text.spans)
    return Marks(text.keys, media_ends, ends, ends[0] if system else 0, stable_end)


def plan(
    prompt: Marks,
    *,
    start: int = 0,
    junction: int = 0,
    interval: int = 10_000,
    min_gain: int = 4 * BLOCK,
    learned: Sequence[LearnedPlace] = (),
) -> dict[int, str]:
    return dict(
        plan_snapshots(
            prompt,
            start=start,
            junction=junction,
            interval=interval,
            min_gain=min_gain,
            learned=learned,
        )
    )


def test_a_plain_prompt_gets_its_end() -> None:
    assert plan(marks(words(40))) == {32: "prompt_end"}
    assert plan(marks(words(32))) == {16: "prompt_end"}
    assert plan(marks(words(16))) == {}
    assert plan(marks(words(1))) == {}


def test_the_end_of_a_picture_comes_first() -> None:
    prompt = marks(words(5), Image("cat", 30), words(20))
    assert list(plan(prompt).items()) == [(35, "media"), (48, "prompt_end")]


def test_a_picture_at_the_very_end_is_no_place() -> None:
    """The state there has seen the last token."""
    prompt = marks(words(20), Image("cat", 30))
    assert plan(prompt) == {16: "prompt_end"}


def test_what_is_cached_needs_no_snapshot() -> None:
    prompt = marks(words(5), Image("cat", 30), words(60))
    assert plan(prompt, start=35) == {80: "prompt_end"}
    assert plan(prompt, start=80) == {}


def test_a_junction_comes_before_the_prompt_end() -> None:
    prompt = marks(words(200))
    assert list(plan(prompt, start=16, junction=112).items()) == [
        (112, "junction"),
        (192, "prompt_end"),
    ]


def test_the_stable_end_counts_where_it_falls_into_another_block() -> None:
    turn = [*words(37), END_OF_TURN, *words(20)]
    assert plan(marks(turn, stable_end=40)) == {48: "prompt_end", 38: "stable_end"}
    assert plan(marks(turn, stable_end=50)) == {48: "prompt_end"}
    turn = [*words(49), END_OF_TURN, *words(5), END_OF_TURN, 9]
    assert plan(marks(turn, stable_end=52)) == {56: "prompt_end"}


def test_messages_count_from_the_system_and_the_last_two_if_they_gain_enough() -> None:
    long, short = [*words(79), END_OF_TURN], [*words(9), END_OF_TURN]
    prompt = marks(long, long, long, long, words(40), system=True)
    assert plan(prompt) == {352: "prompt_end", 80: "system", 240: "message", 320: "message"}
    assert plan(prompt, start=64) == {352: "prompt_end", 240: "message", 320: "message"}
    prompt = marks(short, long, short, words(40), system=True)
    assert plan(prompt) == {128: "prompt_end", 90: "message"}


def test_regular_points_move_down_out_of_a_picture() -> None:
    prompt = marks(words(50), Image("cat", 90), words(180))
    found = plan(prompt, interval=64, min_gain=BLOCK)
    assert found == {
        140: "media",
        304: "prompt_end",
        48: "interval",
        192: "interval",
        256: "interval",
    }


def test_regular_points_keep_their_distance_from_what_is_before_them() -> None:
    prompt = marks(words(120), Image("cat", 6), words(200))
    found = plan(prompt, interval=128, min_gain=64)
    near = {192: "near_end", 128: "near_end"}
    assert found == {126: "media", 320: "prompt_end", 256: "interval", **near}
    assert 128 in plan(prompt, interval=128, min_gain=1)


def test_a_long_prompt_spreads_its_regular_points() -> None:
    found = plan(marks(words(64 * 64 + 1)), interval=64)
    assert len(found) == MAX_NEW_SNAPSHOTS
    points = [position for position, kind in found.items() if kind == "interval"]
    assert points == [576, 1152, 1728, 2304, 2880, 3456, 4032]


def test_learned_places_come_before_those_of_the_interval() -> None:
    prompt = marks(words(410))
    known = [LearnedPlace(2, from_end=True), LearnedPlace(9, from_end=False)]
    assert list(plan(prompt, interval=128, learned=known).items()) == [
        (400, "prompt_end"),
        (368, "learned"),
        (144, "learned"),
        (128, "interval"),
        (256, "interval"),
        (384, "near_end"),
        (320, "near_end"),
    ]


def test_the_last_chunks_before_the_end_of_a_long_prompt() -> None:
    prompt = marks(words(500))
    found = plan(prompt, interval=400)
    assert found == {
        496: "prompt_end",
        400: "interval",
        448: "near_end",
        384: "near_end",
        320: "near_end",
    }
    assert plan(prompt, start=320, interval=400) == {496: "prompt_end", 400: "interval"}


def test_learned_places_may_be_close_together_but_not_close_to_what_is_before() -> None:
    prompt = marks(words(410))
    known = [
        LearnedPlace(2, from_end=True),
        LearnedPlace(1, from_end=True),
        LearnedPlace(90, from_end=False),
    ]
    assert plan(prompt, learned=known) == {400: "prompt_end", 368: "learned", 384: "learned"}
    assert plan(prompt, start=320, learned=known) == {400: "prompt_end", 384: "learned"}
    assert plan(prompt, start=336, learned=known) == {400: "prompt_end"}


def test_learned_places_move_down_out_of_a_picture() -> None:
    prompt = marks(words(50), Image("cat", 90), words(180))
    found = plan(prompt, learned=[LearnedPlace(6, from_end=False)], min_gain=BLOCK)
    assert found == {140: "media", 304: "prompt_end", 48: "learned"}


def test_many_pictures_still_leave_room_for_the_end() -> None:
    segments: list[list[int] | Image] = []
    for index in range(12):
        segments += [Image(str(index), 20), words(3)]
    prompt = marks(*segments, words(40))
    found = plan(prompt, junction=112)
    assert list(found)[:3] == [273, 112, 304]
    assert list(found)[3:] == [250, 227, 204, 181, 158]


def test_no_room_no_points() -> None:
    prompt = marks(words(100))
    assert plan_snapshots(prompt, start=0, junction=0, interval=16, min_gain=16, max_new=0) == ()
    one = plan_snapshots(prompt, start=0, junction=0, interval=16, min_gain=16, max_new=1)
    assert one == ((96, "prompt_end"),)


@pytest.mark.parametrize("interval", [16, 48, 1024])
@given(
    segments=st.lists(
        st.one_of(
            st.integers(1, 60).map(words),
            st.just([END_OF_TURN]),
            st.builds(Image, st.sampled_from(["cat", "dog"]), st.integers(1, 80)),
        ),
        min_size=1,
        max_size=12,
    ),
    shares=st.tuples(*[st.floats(0, 1)] * 3),
)
def test_whatever_the_prompt_every_place_is_possible(
    interval: int, segments: list[list[int] | Image], shares: tuple[float, float, float]
) -> None:
    prompt = marks(*segments)
    length = len(prompt)
    prompt.stable_end = int(shares[0] * length)
    start = prompt.keys.last_cut(int(shares[1] * length))
    junction = prompt.keys.last_cut(int(shares[2] * length))
    found = plan(prompt, start=start, junction=junction, interval=interval)
    assert len(found) <= MAX_NEW_SNAPSHOTS
    for position, kind in found.items():
        assert start < position < length
        assert position in prompt.keys.cuts and not prompt.keys.inside_span(position)
        if kind in ("system", "message", "interval"):
            spaced = (p for p, other in found.items() if p < position and other != "near_end")
            before = max([start, *spaced])
            assert position - before >= 4 * BLOCK or found.get(before) in (
                "system",
                "message",
                "interval",
            )
    end = prompt.keys.last_cut(length - 1)
    assert end <= start or end in found
