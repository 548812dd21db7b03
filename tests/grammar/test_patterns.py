"""Patterns: classes of characters that engines read in different ways, and lengths beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from schema_walks import WIDTH

import vlm_serve
from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar import worker
from vlm_serve.grammar.compiler import GrammarCompiler
from vlm_serve.grammar.lark import pattern
from vlm_serve.grammar.library import Library
from vlm_serve.grammar.searching import is_ascii, whole
from vlm_serve.preprocess.text.tokenizer import Tokenizer

# White space and letters of ECMA-262 beside those of Python's `re`.
_ECMA = {"s": "\ufeff", "w": "", "d": ""}
EMAIL = {"format": "email"}
NAMES = {"pattern": "^[A-Z][a-z]+( [A-Z][a-z]+)+$"}


@pytest.fixture(scope="module")
def guidance() -> Iterator[Library]:
    tokenizer = Tokenizer(Path(vlm_serve.__file__).parent / "demo" / "dense")
    compiler = GrammarCompiler(tokenizer, WIDTH, tokenizer.eos_ids)
    yield compiler._library()
    compiler.close()


def takes(library: Library, matcher: Any, text: str) -> bool:
    tokens = library.tokenizer.tokenize_bytes(text.encode())
    copy = matcher.deep_copy()
    matches = copy.validate_tokens(tokens) == len(tokens) and copy.consume_tokens(tokens)
    return bool(matches and copy.is_accepting())


@pytest.mark.parametrize("name", "swd")
@pytest.mark.parametrize("form", ["^\\{}$", "^[\\{}]$", "^[^\\{}]$"])
@pytest.mark.parametrize("upper", [False, True])
def test_a_class_has_only_what_all_engines_read_in_it(
    guidance: Library, name: str, form: str, upper: bool
) -> None:
    searched = form.format(name.upper() if upper else name)
    matcher, error = guidance.parsed(guidance.lark(f"start: T\nT: {pattern(whole(searched))}\n"))
    assert not error
    taken = 0
    negated = upper != ("[^" in form)
    for code in [*range(0x400), *range(0x2000, 0x2080), 0x9F4, 0x3000, 0xFEFF, 0xFF10, 0x1F600]:
        sign = chr(code)
        if takes(guidance, matcher, sign):
            taken += 1
            assert re.search(searched, sign), hex(code)
            assert sign not in _ECMA[name] or not negated
    assert taken


def built(guidance: Library, **keywords: Any) -> Any:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", **keywords}},
        "required": ["a"],
    }
    (grammar, _) = worker.json_grammar(schema, guidance)
    return guidance.parsed(grammar)[0]


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        (EMAIL, (0, 100)),
        (EMAIL, (3, 254)),
        (NAMES, (5, 255)),
        (NAMES | EMAIL, (0, 20)),
        ({"pattern": "^[\\w.-]+$"}, (80, 100)),
        ({"pattern": "^é+$"}, (2, 100)),
    ],
    ids=str,
)
def test_a_text_in_json_has_a_pattern_and_a_length(
    guidance: Library, text: dict[str, str], bounds: tuple[int, int]
) -> None:
    least, most = bounds
    if text == NAMES | EMAIL:
        with pytest.raises(InvalidRequestError, match="#/properties/a cannot be satisfied"):
            built(guidance, **text, minLength=least, maxLength=most)
        return
    matcher = built(guidance, **text, minLength=least, maxLength=most)
    for size in (least - 1, least, most, most + 1, 2 * most):
        value = {
            str(EMAIL): "a" * (size - 6) + "@ab.de",
            str(NAMES): "Anna B" + "o" * (size - 6),
        }.get(str(text), ("é" if "é" in str(text) else "a") * size)
        if len(value) == size:
            answer = json.dumps({"a": value}, ensure_ascii=False)
            assert takes(guidance, matcher, answer) == (least <= size <= most), size


@pytest.mark.parametrize("most", [255, 320, 1000, 10_000])
def test_an_email_may_have_any_bound(guidance: Library, most: int) -> None:
    answer = json.dumps({"a": "someone@example.com"})
    assert takes(guidance, built(guidance, **EMAIL, maxLength=most), answer)


def test_lengths_no_answer_has_and_such_with_a_point(guidance: Library) -> None:
    for most in (100.0, 10**18, 1 << 31):
        assert takes(guidance, built(guidance, maxLength=most), '{"a": "x"}')
    assert not takes(guidance, built(guidance, maxLength=2.0), '{"a": "xxx"}')
    with pytest.raises(InvalidRequestError, match="#/properties/a/minLength is more than any"):
        built(guidance, minLength=10**18)


def test_a_search_given_up_is_told_in_our_words(guidance: Library) -> None:
    with pytest.raises(InvalidRequestError, match="the patterns and the length is too much work"):
        built(guidance, pattern="foo", minLength=100)


@pytest.mark.parametrize(
    ("searched", "ascii_only"),
    [
        ("^a$", True),
        ("^[a-z ]+(?:-[0-9\\s]{2,})*$|^\\x41$", True),
        ("^$", True),
        ("^(^a$|b)$", True),
        ("a", False),
        ("^a", False),
        ("^a$|b$", False),
        ("^(^a$|é)$", False),
        ("^.$", False),
        ("^\\S$", False),
        ("^[^a]$", False),
        ("^[a\\W]$", False),
        ("^\\p{L}$", False),
        ("^é$", False),
        ("^\\xe9$", False),
        ("^[]$", False),
        ("^[^]$", False),
        ("(", False),
    ],
)
def test_patterns_of_ascii_are_told_from_others(searched: str, ascii_only: bool) -> None:
    assert is_ascii(searched) == ascii_only
