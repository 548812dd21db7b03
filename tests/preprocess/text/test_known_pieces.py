"""Pieces of text that were encoded before are not encoded again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from vlm_serve.preprocess.text.known_pieces import KnownPieces
from vlm_serve.preprocess.text.tokenizer import Tokenizer

SENTENCE = "The river bends twice before it meets the old mill, and nobody remembers why. "


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


def watched(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the texts that the tokenizer sees from now on."""
    seen: list[str] = []
    encode = tokenizer.encode_plain

    def counting(text: str) -> list[int]:
        seen.append(text)
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode_plain", counting)
    return seen


@pytest.fixture
def encoded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return watched(tokenizer, monkeypatch)


def test_a_piece_that_grew_is_encoded_from_its_last_part_on(
    tokenizer: Tokenizer, encoded: list[str]
) -> None:
    known = KnownPieces(tokenizer, 1 << 20)
    text = SENTENCE * 400
    assert known.encode(text, "a") == tokenizer.encode_plain(text)
    encoded.clear()
    assert known.encode(text, "a") == known.encode(text, "a")
    assert not encoded
    grown = text + "And so it went on."
    ids = known.encode(grown, "a")
    assert sum(map(len, encoded)) < 5000
    assert ids == tokenizer.encode_plain(grown)


def test_tenants_share_nothing(tokenizer: Tokenizer, encoded: list[str]) -> None:
    known = KnownPieces(tokenizer, 1 << 20)
    for salt in ("a", "b", "a", ""):
        known.encode("The same text.", salt)
    assert encoded == ["The same text."] * 3
    assert known.counts == {"hits": 1, "misses": 3}


def test_memory_is_bounded(tokenizer: Tokenizer) -> None:
    known = KnownPieces(tokenizer, 20_000)
    for number in range(200):
        known.encode(f"{number}. {SENTENCE}", "")
        assert known.num_bytes <= 20_000
    assert known.num_bytes > 10_000
    known.encode("a" * 50_000, "")
    assert known.num_bytes <= 20_000
    known.clear()
    assert known.num_bytes == 0
    nothing = KnownPieces(tokenizer, 0)
    assert nothing.encode(SENTENCE, "") == nothing.encode(SENTENCE, "")
    assert nothing.num_bytes == 0


@pytest.mark.parametrize("text", ["ab" * 100_000, "\ua984" * 100_000])
def test_a_text_that_cannot_be_cut_is_encoded_once(
    checkpoint: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(checkpoint, max_tokens=1 << 20)
    seen = watched(tokenizer, monkeypatch)
    known = KnownPieces(tokenizer, 1 << 20)
    known.encode_all([text], "", lambda: pytest.fail("it fits"))
    assert seen == [text]
    assert known.num_bytes <= 1 << 20


def test_a_text_that_cannot_be_cut_and_cannot_fit_is_not_encoded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(checkpoint, max_tokens=20_000)
    seen = watched(tokenizer, monkeypatch)

    def refuse() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        KnownPieces(tokenizer, 1 << 20).encode_all(["\ua984" * 300_000], "", refuse)
    assert sum(map(len, seen)) < 10_000


def test_threads_may_share_it(tokenizer: Tokenizer) -> None:
    known = KnownPieces(tokenizer, 30_000)
    texts = [f"{number} {SENTENCE}" for number in range(40)]
    expected = [tokenizer.encode_plain(text) for text in texts]
    faults: list[str] = []

    def work() -> None:
        for _ in range(5):
            for text, ids in zip(texts, expected, strict=True):
                if known.encode(text, "") != ids:
                    faults.append(text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert known.counts.total() == 4 * 5 * 40
