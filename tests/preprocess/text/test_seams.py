"""Where texts are cut, their parts have the tokens of the whole."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from checkpoint_spec import SMALL_SPECS
from make_checkpoint import make_checkpoint
from sweeps import quick
from tokenizers import Regex, normalizers, pre_tokenizers

from vlm_serve.preprocess.text.family import QWEN2, QWEN3_5
from vlm_serve.preprocess.text.seams import (
    Seams,
    _class_of,
    alternatives,
    find_seams,
    pairs_between,
)
from vlm_serve.preprocess.text.tokenizer import Tokenizer

THREES = str(QWEN2.split).replace(r"\p{N}|", r"\p{N}{1,3}|")
PATTERNS = {"Qwen2": QWEN2.split, "Qwen3.5": QWEN3_5.split, "three digits": THREES}
LETTERS = [
    *"aZs'tl09 \r\n\t.,<>|-é_",
    *"你好，。",
    *"ที่กิ",
    *"किंनमस्ते",
    *"السَّلام",
    *"가각",
    *("\U0001f469", "\u200d", "\u1100", "\u1161", "\u11a8", "\u3000", "\xa0", "\x85", "\u2028"),
    *("\u0301", "\u0344", "²", "Ⅷ", "\u180e", "\x1c", "ſ", "\u212b", "\u09be", "\u09c7", "\ufb01"),
    *("\u0660", "\u037e", "\u1fef", "\u212a", "\U0001f468\U0001f3fd", "'s", "  ", "\n\n", "\r\n"),
]


def text_of(rng: random.Random, most: int = 24) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, most)))


@pytest.mark.parametrize("seed", quick(range(24), 1))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_words_are_those_of_the_whole_text(pattern: str, seed: int) -> None:
    rng = random.Random(seed)
    seams = Seams(pairs_between(alternatives(str(PATTERNS[pattern]))))
    splitter = pre_tokenizers.Split(Regex(str(PATTERNS[pattern])), behavior="isolated")
    compose = normalizers.NFC().normalize_str

    def words(text: str) -> list[str]:
        return [word for word, _ in splitter.pre_tokenize_str(compose(text))]

    found = 0
    for _ in range(700):
        text = text_of(rng)
        at, whole = 0, words(text)
        while (end := seams.next(text, at + 1)) is not None:
            at = end
            found += 1
            assert words(text[:at]) + words(text[at:]) == whole, (text, at)
    assert found > 700


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_vl", "qwen3_next", "qwen3"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    spec = replace(SMALL_SPECS[request.param], vocab_size=1024)
    return Tokenizer(make_checkpoint(tmp_path_factory.mktemp("tokenizer"), spec))


def test_tokens_are_those_of_the_whole_text(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    seams = find_seams(tokenizer.backend)
    added = ["<think>", "</tool_call>", "<|im_end|>", "<think", "tool_call>"]
    for _ in range(200):
        text = text_of(rng) + rng.choice(added) + text_of(rng)
        whole = tokenizer.encode_plain(text)
        assert [i for part in seams.parts(text, 3) for i in tokenizer.encode_plain(part)] == whole
        at = 0
        while (end := seams.next(text, at + 1)) is not None:
            at = end
            ids = tokenizer.encode_plain(text[:at]) + tokenizer.encode_plain(text[at:])
            assert ids == whole, (text, at)


def test_parts_of_a_text_that_grows_stay() -> None:
    rng = random.Random(2)
    seams = Seams(pairs_between(alternatives(str(QWEN3_5.split))))
    for _ in range(300):
        text = text_of(rng, 200)
        grown = text + text_of(rng, 200)
        parts, after = list(seams.parts(text, 20)), list(seams.parts(grown, 20))
        assert "".join(parts) == text
        assert after[: len(parts) - 1] == parts[:-1]


@pytest.mark.parametrize("kind", ["L", "N", "P"])
def test_classes_are_those_of_the_library(kind: str) -> None:
    known = {"L": r"\p{L}", "N": r"\p{N}", "P": r"[^\s\p{L}\p{M}\p{N}]"}[kind]
    every = map(chr, (*range(0xD800), *range(0xE000, sys.maxunicode + 1)))
    characters = [character for character in every if _class_of(character) == kind]
    assert len(characters) > 500
    removed = pre_tokenizers.Split(Regex(known), behavior="removed")
    assert removed.pre_tokenize_str("".join(characters)) == []


def test_an_unknown_tokenizer_has_no_seams(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def seams_with(pattern: str, **options: bool) -> str | None:
        backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        given = {"add_prefix_space": False, "use_regex": False, **options}
        steps = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(**given),
        ]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        seams = find_seams(backend)
        return None if seams.next("one two, three\nfour 5 6", 1) is None else "cut"

    known = str(QWEN2.split)
    assert seams_with(known) == "cut"
    assert seams_with(known + r"|\p{L}+ \p{L}+") is None
    assert seams_with(known.replace(r"\p{N}", r"\p{N}+")) is None
    assert seams_with(known, add_prefix_space=True) is None
    assert seams_with(known, use_regex=True) is None
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.normalizer = normalizers.NFKC()
    assert find_seams(backend).next("one two", 1) is None
    backend.normalizer = None
    backend.add_tokens([tokenizers.AddedToken("<odd>", lstrip=True)])
    assert find_seams(backend).next("one two", 1) is None


def test_a_text_without_seams_is_one_part() -> None:
    seams = Seams(pairs_between(alternatives(str(QWEN3_5.split))))
    for text in ("a" * 100_000, " " * 100_000, "\u0e17\u0e35\u0e48" * 30_000):
        assert list(seams.parts(text, 2048)) == [text]
