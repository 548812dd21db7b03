"""Texts that lose their middle."""

from __future__ import annotations

from pathlib import Path

import pytest

import vlm_serve
from vlm_serve.eval.longbench import fit, keep_ends
from vlm_serve.preprocess.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(vlm_serve.__file__).parent / "demo" / "dense")


def test_both_ends_are_kept() -> None:
    ids = list(range(10))
    assert keep_ends(ids, 10) == ids
    assert keep_ends(ids, 4) == [0, 1, 8, 9]
    assert keep_ends(ids, 5) == [0, 1, 7, 8, 9]
    assert keep_ends(ids, 1) == [9]
    assert keep_ends(ids, 0) == []


def test_a_text_that_fits_is_left_alone(tokenizer: Tokenizer) -> None:
    text = "A red star.\r\n\tIt is big. "
    assert fit(text, tokenizer, 100, lambda each: len(tokenizer.encode_plain(each)) + 9) == text


@pytest.mark.parametrize("text", ["word by word " * 300, "ж€😀字" * 200, "a" * 5000])
@pytest.mark.parametrize("around", [0, 7])
def test_a_long_text_fills_the_room(tokenizer: Tokenizer, text: str, around: int) -> None:
    asked = []

    def length_of(each: str) -> int:
        asked.append(len(tokenizer.encode_plain(each)))
        return asked[-1] + around

    room = 100
    cut = fit(text, tokenizer, room, length_of)
    assert room - 16 <= length_of(cut) <= room
    assert max(asked) <= room, "texts that are too long by themselves are not prepared"
    assert text.startswith(cut[:15].rstrip("\ufffd"))
    assert text.endswith(cut[-15:].lstrip("\ufffd"))


def test_without_room_nothing_is_left(tokenizer: Tokenizer) -> None:
    assert fit("A red star.", tokenizer, 5, lambda each: 6 + len(each)) == ""
    assert fit("A red star.", tokenizer, -5, len) == ""
