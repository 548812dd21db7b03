"""Enforced calls fit the schema of their parameters, or the schema is refused with a path."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from client_schemas import SCHEMAS
from schema_generator import SchemaGenerator
from schema_walks import WIDTH, fits, walk
from sweeps import quick

import vlm_serve
from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar.compiler import GrammarCompiler
from vlm_serve.grammar.state import Grammar
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.answers.output_parser import OutputParser
from vlm_serve.server.answers.pieces import ToolForm
from vlm_serve.server.api.shared.sampling import ToolChoice, with_tools

SHARE = 100
SEEDS = 2000
FORMS: tuple[ToolForm, ...] = ("qwen3_xml", "hermes")
CLOSINGS: dict[str, Any] = {
    "closings": (b'"', b"}", b"]", b"\n"),
    "ending": b"\n</parameter>\n",
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(vlm_serve.__file__).parent / "demo" / "dense")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, WIDTH, tokenizer.eos_ids, seconds=60.0)
    yield compiler
    compiler.close()


def grammar_of(
    compiler: GrammarCompiler, tools: Mapping[str, Any], form: ToolForm, *, parallel: bool = False
) -> Grammar:
    choice = ToolChoice("required", tuple(tools), parallel=parallel)
    constraint = with_tools(None, choice, tools, "response_format", form)
    assert constraint is not None
    return compiler.compile(constraint)


def calls_of(answer: str, tools: Mapping[str, Any], form: ToolForm) -> list[tuple[str, Any]]:
    """Return the calls that the server reads from an answer, cut into pieces, and no text."""
    parser = OutputParser(tools=tools, form=form, enforced=True)
    pieces = [
        piece for at in range(0, len(answer), 7) for piece in parser.feed(answer[at : at + 7])
    ]
    pieces += parser.finish()
    names = [piece.text for piece in pieces if piece.kind == "tool_name"]
    texts = [""] * len(names)
    for piece in pieces:
        assert piece.kind in ("tool_name", "tool_arguments"), (answer, piece)
        if piece.kind == "tool_arguments":
            texts[piece.call] += piece.text
    return list(zip(names, map(json.loads, texts), strict=True))


def enforced(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    form: ToolForm,
    seeds: range,
    found: dict[str, int],
) -> None:
    """Count schemas in `found`; all finished calls fit theirs."""
    for seed in seeds:
        schema = SchemaGenerator(random.Random(seed)).parameters()
        found["all"] += 1
        try:
            grammar = grammar_of(compiler, {"f": schema}, form)
        except InvalidRequestError as error:
            assert "#" in error.message, (seed, error.message)
            continue
        found["enforced"] += 1
        for index in range(3):
            choices = random.Random(1000 * seed + index)
            rolling = index == 0 and seed % 10 == 0
            answer = walk(grammar, tokenizer, choices, rolling=rolling, **CLOSINGS)
            if answer is None:
                continue
            ((name, value),) = calls_of(answer, {"f": schema}, form)
            assert name == "f"
            found["answers"] += 1
            assert fits({"type": "object", **schema}, value), (seed, answer, value, schema)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("start", quick(range(0, SEEDS, SHARE), 1))
def test_random_parameters(
    compiler: GrammarCompiler, tokenizer: Tokenizer, form: ToolForm, start: int
) -> None:
    found = dict.fromkeys(("all", "enforced", "answers"), 0)
    enforced(compiler, tokenizer, form, range(start, start + SHARE), found)
    assert found["enforced"] >= 0.78 * found["all"], found
    assert found["answers"] >= 1.5 * found["enforced"], found


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
def test_most_random_parameters_are_enforced(compiler: GrammarCompiler, form: ToolForm) -> None:
    count = 0
    for seed in range(SEEDS):
        schema = SchemaGenerator(random.Random(seed)).parameters()
        try:
            grammar_of(compiler, {"f": schema}, form)
        except InvalidRequestError:
            continue
        count += 1
    assert count >= 0.85 * SEEDS


@pytest.mark.parametrize("form", FORMS)
def test_schemas_of_clients(
    compiler: GrammarCompiler, tokenizer: Tokenizer, form: ToolForm
) -> None:
    """All of them are functions of one request, as an agent has them."""
    tools = {
        f"f{at}": schema
        for at, schema in enumerate(SCHEMAS.values())
        if isinstance(schema, Mapping)
        and schema.get("type") == "object"
        and (form == "hermes" or "ü>" not in (schema.get("properties") or {}))
    }
    grammar = grammar_of(compiler, tools, form, parallel=True)
    count = 0
    for seed in range(60):
        answer = walk(grammar, tokenizer, random.Random(seed), **CLOSINGS)
        for name, value in calls_of(answer or "", tools, form):
            count += 1
            assert fits(tools[name], value), (answer, value)
    assert count >= 20


def walks(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, form: ToolForm
) -> list[Any]:
    """Return the arguments of random calls."""
    grammar, found = grammar_of(compiler, {"f": schema}, form), []
    for seed in range(40):
        answer = walk(grammar, tokenizer, random.Random(seed), **CLOSINGS)
        found += [value for _, value in calls_of(answer or "", {"f": schema}, form)]
    assert len(found) >= 20
    return found


def objects(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


ROW = {"type": "array", "items": {"enum": ["1", "a"]}, "minItems": 1}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [objects(a={"enum": ["x"]}), objects(a={"enum": ["x y"]}, b={"enum": ["z"]})]},
        {"anyOf": [objects(a={"const": 1}), objects(a={"type": "string", "maxLength": 3})]},
        objects(a={"anyOf": [{"type": "string", "pattern": "^[a-z{]+$"}, objects(x={"const": 1})]}),
        objects(a={"anyOf": [{"enum": ["12", "true"]}, {"type": "integer", "minimum": 100}]}),
        objects(a={"type": "string", "pattern": "^[a-z ]+$", "maxLength": 3, "minLength": 2}),
        objects(a={"type": ["string", "boolean", "null"], "maxLength": 4}),
        {"type": "object", "required": ["b"]},
        {"$ref": "#/$defs/P", "$defs": {"P": objects(a={"type": "string", "maxLength": 2})}},
        {"allOf": [objects(a={"type": "string"}), objects(a={"maxLength": 2})]},
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
        objects(a={"type": "string", "format": "regex"}),
        {"properties": {"a": {"$ref": "#/$defs/D", "const": "no"}, "b": {"type": "boolean"}},
         "required": ["b"], "$defs": {"D": {"enum": ["yes", 1]}}, "type": "object"},
        {"oneOf": [
            objects(kind={"const": "x"}) | {"required": ["kind", "a"], "additionalProperties": ROW},
            objects(kind={"const": "y"}, a={"type": "string"}),
        ]},
    ],
    ids=lambda schema: str(schema)[:40],
)  # fmt: skip
def test_combinations(
    compiler: GrammarCompiler, tokenizer: Tokenizer, form: ToolForm, schema: dict[str, Any]
) -> None:
    for value in walks(compiler, tokenizer, schema, form):
        assert fits(schema, value), value


def test_a_name_that_a_tag_cannot_have(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = objects(**{"ü>": {"enum": ["x"]}})
    with pytest.raises(InvalidRequestError, match="#/properties/ü> has a name that a tag cannot"):
        grammar_of(compiler, {"f": schema}, "qwen3_xml")
    assert {"ü>": "x"} in walks(compiler, tokenizer, schema, "hermes")


@pytest.mark.parametrize("form", FORMS)
def test_only_values_without_an_end(compiler: GrammarCompiler, form: ToolForm) -> None:
    """Nothing fits the first alternative, which only llguidance notices."""
    part = {"type": "object", "required": ["z"]}
    nothing = [part | {"properties": {"z": {"type": each}}} for each in ("null", "string")]
    schema = objects(a={"anyOf": [{"allOf": nothing}, {"$ref": "#"}]})
    with pytest.raises(InvalidRequestError) as refused:
        grammar_of(compiler, {"f": schema}, form)
    assert refused.value.message.startswith(
        "the JSON schema of the function 'f' cannot be used: #/properties/a/anyOf/1 "
        "cannot be enforced: the text that it begins with in any case is endless"
    )


@pytest.mark.parametrize("form", FORMS)
def test_alternatives_told_apart_twice(
    compiler: GrammarCompiler, tokenizer: Tokenizer, form: ToolForm
) -> None:
    """The property that tells them apart may be missing from the names that one requires."""
    branches = [
        objects(kind={"const": "x"}, b={"type": "boolean"}) | {"required": ["b"]},
        objects(kind={"const": "y"}, c={"type": "boolean"}) | {"required": ["kind", "c"]},
    ]
    values = walks(compiler, tokenizer, {"type": "object", "oneOf": branches}, form)
    assert {value["kind"] for value in values} == {"x", "y"}


@pytest.mark.parametrize("form", FORMS)
def test_a_refusal_names_the_function_and_the_place(
    compiler: GrammarCompiler, form: ToolForm
) -> None:
    for schema, place in (
        (objects(a={"contains": {}}), "#/properties/a/contains "),
        (objects(a={"type": "zork"}), "#/properties/a "),
        ({"type": "array"}, "# "),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            grammar_of(compiler, {"g": {}, "f": schema}, form)
        begin = f"the JSON schema of the function 'f' cannot be used: {place}"
        assert refused.value.message.startswith(begin)
