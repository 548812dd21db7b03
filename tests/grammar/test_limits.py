"""Hostile schemas are a clear refusal within a bounded time and memory, or they are followed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vlm_serve
from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar import state as matching_state
from vlm_serve.grammar.compiler import COMPILE_SECONDS, GRACE_SECONDS, GrammarCompiler
from vlm_serve.grammar.state import Grammar, GrammarState
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.api.shared.sampling import ToolChoice, with_tools
from vlm_serve.structured_outputs import StructuredOutputs

WIDTH = 768
MEMORY = 600 << 20


def doubling(keyword: str, **beside: Any) -> dict[str, Any]:
    """Definitions that each name the next one twice: 2^30 of them if they were unfolded."""
    definitions: dict[str, Any] = {
        f"d{at}": {keyword: [{"$ref": f"#/$defs/d{at + 1}"}] * 2, **beside} for at in range(30)
    }
    definitions["d30"] = {"type": "object", "properties": {"x": {"type": "string"}}}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": {"type": "integer"}}}
    return schema


def text(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


VALUES: dict[str, Any] = {
    "a million repetitions": text(pattern="^a{1000000}$"),
    "a million repetitions, later": text(pattern="^b?c?a{1000000}$"),
    "a length of a million": text(maxLength=1_000_000, pattern="^([a-z]+ )*$"),
    "a length of a billion": text(minLength=999_999_999),
    "a million items": {"type": "array", "minItems": 1_000_000, "items": {"type": "integer"}},
    "nested repetitions": text(pattern="^(((((a|b){1,50}c?){1,50}d?){1,50}e?){1,50}f?){1,50}$"),
    "catastrophic if backtracking": text(pattern="^(a+)+$"),
    "an exponential automaton": text(pattern="^(.*a.{30}|.*b.{31}|.*c.{32})$", maxLength=500),
    "patterns intersected": {
        "allOf": [text(pattern=each) for each in ("a.{20}b.{20}c", "c.{20}b.{20}a", "d.{15}e")]
    },
    "multiples": {"type": "integer", "multipleOf": 999_983},
    "multiples of two": {
        "allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}, {"minimum": 1}]
    },
    "a huge enum": {"enum": [f"word{at * 7919 % 4001}" for at in range(4000)]},
    "a huge enum with a length": {"enum": [f"w{at}" * 3 for at in range(2500)], "maxLength": 9},
    "alternatives multiplied": {
        "allOf": [
            {"anyOf": [text(pattern=f"^[a-z]{{{first}}}.{{{second}}}") for first in range(12)]}
            for second in range(6)
        ]
    },
    "a wide class": text(pattern=r"^(\w\S\W\D){1,300}\w{1000}$"),
    "deep": nested(20),
}
WHOLE: dict[str, Any] = {
    "wide": {"properties": {f"p{at}": {"type": "string"} for at in range(1200)}},
    "wide and needed": {
        "properties": {f"p{at}": text(pattern=f"^a{{1,{at + 1}}}$") for at in range(600)},
        "required": [f"p{at}" for at in range(600)],
    },
    "alternatives of objects multiplied": {
        "allOf": [
            {"anyOf": [{"properties": {f"a{i}{j}": {"type": "string"}}} for i in range(10)]}
            for j in range(8)
        ]
    },
    "dependencies in a circle": {
        "properties": {f"p{at}": {"type": "string"} for at in range(40)},
        "dependentRequired": {f"p{at}": [f"p{(at + 1) % 40}"] for at in range(40)},
    },
    "hundreds of alternatives": {
        "oneOf": [
            {"properties": {f"a{at}": {"type": "string"}}, "required": [f"a{at}"]}
            for at in range(400)
        ]
    },
    "patterns of names": {
        "patternProperties": {f"^{chr(97 + at % 26)}{at}.*x{{1,50}}": {} for at in range(60)}
    },
    "allOf doubled": doubling("allOf"),
    "anyOf doubled": doubling("anyOf"),
    "anyOf doubled beside others": doubling("anyOf", maxProperties=5),
}
SCHEMAS = {
    **{name: {"properties": {"a": each}, "required": ["a"]} for name, each in VALUES.items()},
    **WHOLE,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(vlm_serve.__file__).parent / "demo" / "dense")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, WIDTH, tokenizer.eos_ids)
    compiler.warm()
    yield compiler
    compiler.close()


def forms(schema: Any) -> Iterator[StructuredOutputs]:
    whole = {"type": "object", **schema}
    yield StructuredOutputs(json=whole)
    choice = ToolChoice("required", ("f",), parallel=True)
    for form in ("qwen3_xml", "hermes"):
        found = with_tools(None, choice, {"f": whole}, "response_format", form)
        assert found is not None
        yield found


def resident() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


@pytest.mark.parametrize("name", SCHEMAS)
def test_hostile_schemas_are_bounded(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    for form in forms(SCHEMAS[name]):
        before, begin = resident(), time.monotonic()
        try:
            grammar = compiler.compile(form)
        except InvalidRequestError as error:
            assert error.code == "grammar_limit" or "cannot be" in error.message
            assert "\n" not in error.message
            assert len(error.message) < 600
        else:
            follow(grammar, tokenizer)
        assert time.monotonic() - begin < 2 * COMPILE_SECONDS + GRACE_SECONDS
        assert resident() - before < MEMORY


def follow(grammar: Grammar, tokenizer: Tokenizer) -> None:
    """Follow 60 tokens. A step ends, even if it is the last one for the request."""
    state = GrammarState(grammar, tokenizer.token_bytes, WIDTH)
    for step in range(60):
        mask = state.allowed()
        if mask is None:
            assert state.over_limit
            return
        found = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:WIDTH])
        others = [int(token) for token in found if token not in tokenizer.eos_ids]
        if not others:
            assert len(found), "nothing may follow"
            return
        state.accept(others[step * 7919 % len(others)])


def test_a_matcher_at_its_limit_ends_its_request(
    compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh lexer can follow this one, but takes too long for every token."""
    monkeypatch.setattr(matching_state, "FOLLOW_SECONDS", 0.1)
    form = StructuredOutputs(json=text(pattern="^b?c?a{1000000}$"))
    try:
        grammar = compiler.compile(form)
    except InvalidRequestError:
        pytest.skip("refused before it can be followed")
    state = GrammarState(grammar, tokenizer.token_bytes, WIDTH)
    for sign in '"' + 300 * "a":
        state.allowed()
        if state.over_limit:
            break
        state.accept(tokenizer.encode_plain(sign)[0])
    assert state.over_limit
    assert state.allowed() is None
