"""What a grammar of a JSON schema allows fits the schema, or the schema is refused with a path."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_schemas import SCHEMAS
from schema_generator import SchemaGenerator
from schema_walks import WIDTH, fits, tokens, walk
from sweeps import quick

import vlm_serve
from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar.compiler import GrammarCompiler
from vlm_serve.grammar.state import Grammar, GrammarState
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.structured_outputs import StructuredOutputs

SHARE = 100
SEEDS = 2000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(vlm_serve.__file__).parent / "demo" / "dense")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, WIDTH, tokenizer.eos_ids, seconds=60.0)
    yield compiler
    compiler.close()


def enforced(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seeds: range, found: dict[str, int]
) -> None:
    """Count schemas in `found`; all answers fit theirs."""
    for seed in seeds:
        schema = SchemaGenerator(random.Random(seed)).schema()
        found["all"] += 1
        try:
            grammar = compiler.compile(StructuredOutputs(json=schema))
        except InvalidRequestError as error:
            assert "#" in error.message, (seed, error.message)
            continue
        found["enforced"] += 1
        for index in range(3):
            choices = random.Random(1000 * seed + index)
            answer = walk(grammar, tokenizer, choices, rolling=index == 0 and seed % 10 == 0)
            if answer is None or "inf" in repr(json.loads(answer)):  # 1e999
                continue
            found["answers"] += 1
            assert fits(schema, json.loads(answer)), (seed, answer, schema)


@pytest.mark.parametrize("start", quick(range(0, SEEDS, SHARE), 1))
def test_random_schemas(compiler: GrammarCompiler, tokenizer: Tokenizer, start: int) -> None:
    found = dict.fromkeys(("all", "enforced", "answers"), 0)
    enforced(compiler, tokenizer, range(start, start + SHARE), found)
    assert found["enforced"] >= 0.78 * found["all"], found
    assert found["answers"] >= 2 * found["enforced"], found


@pytest.mark.sweep
def test_most_random_schemas_are_enforced(compiler: GrammarCompiler) -> None:
    count = 0
    for seed in range(SEEDS):
        schema = SchemaGenerator(random.Random(seed)).schema()
        try:
            compiler.compile(StructuredOutputs(json=schema))
        except InvalidRequestError:
            continue
        count += 1
    assert count >= 0.85 * SEEDS


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_of_clients(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    grammar = compiler.compile(StructuredOutputs(json=SCHEMAS[name]))
    answers = [walk(grammar, tokenizer, random.Random(seed)) for seed in range(12)]
    complete = [answer for answer in answers if answer is not None]
    assert complete
    for answer in complete:
        assert fits(SCHEMAS[name], json.loads(answer)), answer


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"if": {}}}}, "#/properties/a/if "),
        ({"items": {"pattern": "^(?=a)b"}}, "#/items/pattern "),
        ({"properties": {"a/b": {"uniqueItems": True}}}, "#/properties/a~1b/uniqueItems "),
        ({"$ref": "http://127.0.0.1/x"}, "#/$ref "),
        ({"$ref": "#/$defs/none"}, "#/$ref "),
        ({"properties": {"a": {"type": "zork"}}, "required": ["a"]}, "#/properties/a "),
        ({"properties": {"a": {"type": "string", "pattern": "(a"}}}, "#/properties/a "),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "# "),
        ({"allOf": [{"type": "object"}, {"type": "string"}]}, "# "),
        ({"type": "object", "properties": {"a": {"required": True}}}, "#/properties/a/required "),
        ({"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}, "#/$defs/A "),
    ],
)
def test_a_refused_schema_names_the_place(
    compiler: GrammarCompiler, schema: dict[str, Any], path: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        compiler.compile(StructuredOutputs(json=schema))
    assert refused.value.message.startswith("the JSON schema cannot be used: " + path)
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("name", SCHEMAS)
def test_notes_of_clients_are_known_if_strict(compiler: GrammarCompiler, name: str) -> None:
    compiler.compile(StructuredOutputs(json=SCHEMAS[name], strict=True))


def test_unknown_keywords_are_refused_if_strict(compiler: GrammarCompiler) -> None:
    schema = {"properties": {"a": {"type": "string", "x-order": 1}}}
    compiler.compile(StructuredOutputs(json=schema))
    with pytest.raises(InvalidRequestError, match="#/properties/a/x-order is the unknown"):
        compiler.compile(StructuredOutputs(json=schema, strict=True))


@pytest.mark.parametrize(
    ("bounds", "right", "wrong"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ("0.5", "0.2"), ("0", "0.0", "0.6")),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ("-0.5", "-0.2"), ("0", "-0", "0.0")),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ("1.2", "1.25"), ("1", "1.0", "1.5")),
        ({"exclusiveMinimum": 1, "maximum": 2}, ("1.5", "2"), ("1", "1.0")),
    ],
)
def test_exclusive_bounds_of_narrow_ranges(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    bounds: dict[str, float],
    right: tuple[str, ...],
    wrong: tuple[str, ...],
) -> None:
    grammar = compiler.compile(StructuredOutputs(json={"type": "number", **bounds}))
    for text in right + wrong:
        assert takes(grammar, tokenizer, text) == (text in right), text


def takes(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    state = GrammarState(grammar, tokenizer.token_bytes, WIDTH)
    for sign in text:
        (token,) = tokenizer.encode_plain(sign)
        if token not in tokens(state):
            return False
        state.accept(token)
    return any(end in tokens(state) for end in tokenizer.eos_ids)
