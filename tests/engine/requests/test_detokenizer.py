"""Text is released when it can no longer change, and never half a character."""

from __future__ import annotations

import random

import pytest

from vlm_serve.engine.requests.detokenizer import Detokenizer


class Bytes:
    """A tokenizer whose tokens are given byte strings."""

    def __init__(self, *tokens: bytes) -> None:
        self.tokens = tokens

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def is_special(self, token_id: int) -> bool:
        return self.tokens[token_id] == b"<special>"


def test_an_unfinished_character_is_held_back() -> None:
    detokenizer = Detokenizer(Bytes(*(bytes([b]) for b in "é!".encode())))
    assert detokenizer.push(0) == ("", None)
    assert detokenizer.push(1) == ("é", None)
    assert detokenizer.push(2) == ("!", None)
    assert detokenizer.finish() == ("", None)


def test_a_character_that_never_ends_becomes_a_replacement_at_the_end() -> None:
    detokenizer = Detokenizer(Bytes("é".encode()[:1]))
    assert detokenizer.push(0) == ("", None)
    assert detokenizer.finish() == ("\ufffd", None)


def test_special_tokens_are_no_text() -> None:
    detokenizer = Detokenizer(Bytes(b"a", b"<special>", b"b"))
    assert [detokenizer.push(i)[0] for i in range(3)] == ["a", "", "b"]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(Bytes(b"a<", b"st", b"x"), stop=["<stop>"])
    assert detokenizer.push(0) == ("a", None)
    assert detokenizer.push(1) == ("", None)
    assert detokenizer.push(2) == ("<stx", None)


def test_the_earliest_stop_string_wins_and_is_cut_off() -> None:
    detokenizer = Detokenizer(Bytes(b"one two ", b"three"), stop=["three", "two"])
    assert detokenizer.push(0) == ("one ", "two")


def test_stop_strings_do_not_count_when_they_may_not() -> None:
    detokenizer = Detokenizer(Bytes(b"stop", b" and stop"), stop=["stop"])
    assert detokenizer.push(0, check_stop=False) == ("stop", None)
    assert detokenizer.push(1) == (" and ", "stop")


@pytest.mark.parametrize("seed", range(20))
def test_pieces_add_up_to_the_whole_text(seed: int) -> None:
    rng = random.Random(seed)
    data = "".join(rng.choice("aé漢🙂<s>") for _ in range(40)).encode()
    cuts = sorted(rng.sample(range(1, len(data)), 12))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    detokenizer = Detokenizer(Bytes(*pieces), stop=["<s><s><s><s><s><s>"])
    text = "".join(detokenizer.push(i)[0] for i in range(len(pieces)))
    assert text + detokenizer.finish()[0] == data.decode()


def test_a_stop_string_may_stay() -> None:
    detokenizer = Detokenizer(Bytes(b"one tw", b"o three"), stop=["two"], include_stop=True)
    assert detokenizer.push(0) == ("one ", None)
    assert detokenizer.push(1) == ("two", "two")


def test_special_tokens_may_stay_and_complete_stop_strings() -> None:
    tokens = Bytes(b"a", b"<special>", b"b")
    detokenizer = Detokenizer(tokens, skip_special=False)
    assert [detokenizer.push(i)[0] for i in range(3)] == ["a", "<special>", "b"]
    detokenizer = Detokenizer(tokens, stop=["special>b"], skip_special=False)
    assert [detokenizer.push(i) for i in range(3)] == [("a", None), ("<", None), ("", "special>b")]
