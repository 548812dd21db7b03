"""Where two prompts part."""

from __future__ import annotations

import random

import pytest
from cache_texts import END_OF_TURN, Image, Segment, Text

from vlm_serve.cache.matching import key_at, shared_cut
from vlm_serve.preprocess.identity.keys import PromptKeys

SIZE = 8


def keys_of(*segments: Segment, salt: str = "") -> PromptKeys:
    """Keys of text and of pictures between their markers."""
    parts: list[Segment] = []
    for each in segments:
        parts += [(5,), each, (6,)] if isinstance(each, Image) else [each]
    return Text(*parts, block_size=SIZE, salt=salt).keys


def picture(content: int) -> Image:
    return Image(str(content), 6)


def test_equal_prompts_share_their_deepest_cut() -> None:
    keys, other = keys_of((9,) * 20), keys_of((9,) * 20)
    assert shared_cut(keys, other, least=1, limit=19) == 16
    assert shared_cut(keys, other, least=17, limit=19) == 0
    assert shared_cut(keys, other, least=1, limit=15) == 8


def test_a_turn_that_both_have_ends_at_a_tail() -> None:
    turn = (*[9] * 10, END_OF_TURN)
    assert shared_cut(keys_of(turn, (7,) * 9), keys_of(turn, (8,) * 9), least=1, limit=19) == 11
    assert shared_cut(keys_of(turn, (7,) * 9), keys_of(turn, (8,) * 9), least=12, limit=19) == 0


def test_a_question_about_a_picture_parts_behind_the_picture() -> None:
    mine, theirs = keys_of(picture(1), (7,) * 9), keys_of(picture(1), (8,) * 20)
    assert shared_cut(mine, theirs, least=1, limit=7) == 7
    assert shared_cut(mine, theirs, least=1, limit=len(mine) - 1) == 8, "the marker behind it"
    other = keys_of(picture(2), (7,) * 9)
    assert shared_cut(mine, other, least=1, limit=len(mine) - 1) == 0


def test_no_boundary_lies_inside_a_medium() -> None:
    """Ends of blocks lie inside of both pictures."""
    mine, theirs = (keys_of((9, 9, 9), picture(1), picture(2), (last,) * 9) for last in (7, 8))
    assert shared_cut(mine, theirs, least=1, limit=9) == 0
    assert shared_cut(mine, theirs, least=1, limit=17) == 10
    assert shared_cut(mine, theirs, least=1, limit=len(mine) - 1) == 18


def test_tenants_share_nothing() -> None:
    mine, theirs = keys_of((9,) * 20), keys_of((9,) * 20, salt="tenant")
    assert shared_cut(mine, theirs, least=1, limit=19) == 0
    turn = (9, END_OF_TURN, 9)
    assert shared_cut(keys_of(turn), keys_of(turn, salt="tenant"), least=1, limit=2) == 0


@pytest.mark.parametrize("seed", range(200))
def test_the_search_finds_what_trying_every_cut_finds(seed: int) -> None:
    rng = random.Random(seed)

    def some(length: int) -> list[Segment]:
        return [
            picture(rng.randrange(3))
            if rng.random() < 0.3
            else tuple(rng.choice([END_OF_TURN, 9, 9, 10]) for _ in range(rng.randint(1, 12)))
            for _ in range(length)
        ]

    common = some(rng.randint(0, 4))
    mine, theirs = (keys_of(*common, *some(rng.randint(1, 4))) for _ in range(2))
    least, limit = rng.randint(1, 20), rng.randint(1, len(mine))
    both = set(theirs.cuts)
    expected = max(
        (
            cut
            for cut in mine.cuts
            if least <= cut <= limit
            and cut in both
            and key_at(mine, cut) == key_at(theirs, cut)
            and not mine.inside_span(cut)
        ),
        default=0,
    )
    assert shared_cut(mine, theirs, least=least, limit=limit) == expected
