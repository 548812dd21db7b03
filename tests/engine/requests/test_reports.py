"""Where the parts of a prompt came from, told in order and without holes."""

from __future__ import annotations

import random

import pytest

from vlm_serve.engine.requests.outputs import PromptSegment
from vlm_serve.engine.requests.reports import prompt_segments, tokens_by_tier


def told(boundary: int, length: int, *fetched: tuple[int, int, str]) -> list[tuple[int, int, str]]:
    segments = prompt_segments(boundary, length, fetched)
    return [(segment.start, segment.end, segment.source) for segment in segments]


@pytest.mark.parametrize(
    ("boundary", "fetched", "wanted"),
    [
        (0, [], [(0, 10, "computed")]),
        (4, [], [(0, 4, "device"), (4, 10, "computed")]),
        (8, [(4, 8, "host")], [(0, 4, "device"), (4, 8, "host"), (8, 10, "computed")]),
        (8, [(6, 8, "disk"), (0, 4, "host")],
         [(0, 4, "host"), (4, 6, "device"), (6, 8, "disk"), (8, 10, "computed")]),
        (8, [(0, 4, "host"), (4, 8, "host")], [(0, 8, "host"), (8, 10, "computed")]),
        (6, [(4, 8, "host")], [(0, 4, "device"), (4, 6, "host"), (6, 10, "computed")]),
        (0, [(4, 8, "host")], [(0, 10, "computed")]),
        (4, [(4, 8, "host")], [(0, 4, "device"), (4, 10, "computed")]),
    ],
)  # fmt: skip
def test_what_was_not_fetched_was_there(
    boundary: int, fetched: list[tuple[int, int, str]], wanted: list[tuple[int, int, str]]
) -> None:
    assert told(boundary, 10, *fetched) == wanted


@pytest.mark.parametrize("seed", range(200))
def test_every_token_has_one_source(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.randint(1, 40)
    boundary = rng.randrange(length)
    edges = sorted(rng.choices(range(length), k=4))
    fetched = [(edges[0], edges[1], "host"), (edges[2], edges[3], "disk")]
    segments = prompt_segments(boundary, length, fetched)
    sources = [segment.source for segment in segments for _ in range(segment.start, segment.end)]
    wanted = [
        "computed"
        if token >= boundary
        else next((tier for first, last, tier in fetched if first <= token < last), "device")
        for token in range(length)
    ]
    assert sources == wanted
    assert all(a.source != b.source for a, b in zip(segments, segments[1:], strict=False))
    tiers = tokens_by_tier(segments)
    assert sum(tiers.values()) == boundary and all(tiers.values())


def test_what_was_computed_is_no_tier() -> None:
    assert tokens_by_tier([PromptSegment(0, 4, "host"), PromptSegment(4, 9, "computed")]) == {
        "host": 4
    }
