"""The compiling process: bounded, replaced after it was ended, and asked once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import vlm_serve
from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar.compiler import GrammarCompiler
from vlm_serve.grammar.state import GrammarState
from vlm_serve.preprocess.tokenizer import Tokenizer
from vlm_serve.structured_outputs import StructuredOutputs

WIDTH = 740
SLOW = StructuredOutputs(
    json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1200)}}
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(vlm_serve.__file__).parent / "demo" / "dense")


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, WIDTH, tokenizer.eos_ids, seconds=0.3)
    yield compiler
    compiler.close()


def test_one_that_takes_too_long_is_ended_and_the_next_one_runs(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="longer than 0.3 s|more than 512 MiB"):
        compiler.compile(SLOW)
    form = StructuredOutputs(regex="ab")
    assert compiler.find(form) is None
    compiled = compiler.compile(form).compiled
    found = compiler.find(form)
    assert found is not None
    assert found.compiled is compiled


def test_text_before_the_grammar_is_free(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(StructuredOutputs(regex="ab"), b"</think>")
    state = GrammarState(grammar, tokenizer.token_bytes, WIDTH)
    for token in tokenizer.encode("Anything at all </think>"):
        state.accept(token)
    assert not state.waiting
    for token in tokenizer.encode_plain("ab"):
        assert not state.finished
        state.accept(token)
    state.accept(min(tokenizer.eos_ids))
    assert state.finished
