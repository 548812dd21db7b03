"""Patterns: classes of characters that engines read in different ways."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from schema_walks import WIDTH

import vlm_serve
from vlm_serve.grammar.compiler import GrammarCompiler
from vlm_serve.grammar.lark import pattern
from vlm_serve.grammar.library import Library
from vlm_serve.grammar.searching import whole
from vlm_serve.preprocess.tokenizer import Tokenizer

# White space and letters of ECMA-262 beside those of Python's `re`.
_ECMA = {"s": "\ufeff", "w": "", "d": ""}


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
