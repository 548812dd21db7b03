"""Bounds of texts in calls in tags: exact in characters, of any size, and however often used."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from schema_walks import WIDTH, fits, tokens, walk
from sweeps import quick

import vlm_serve
from vlm_serve.grammar import library, tags, worker
from vlm_serve.grammar.compiler import GrammarCompiler
from vlm_serve.grammar.lengths import countable
from vlm_serve.grammar.library import Library
from vlm_serve.grammar.state import Compiled, Grammar, GrammarState
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.answers.output_parser import OutputParser
from vlm_serve.server.api.shared.sampling import ToolChoice, with_tools
from vlm_serve.structured_outputs import StructuredOutputs

BEGIN, NAME, END = "<tool_call>\n<function=f>\n", "<parameter=a>\n", "\n</parameter>\n"
SIGNS = "a<é北😀\n"
CLOSINGS: dict[str, Any] = {
    "closings": (b'"', b"}", b"]", b"\n"),
    "ending": END.encode(),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(vlm_serve.__file__).parent / "demo" / "dense")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, WIDTH, tokenizer.eos_ids, seconds=60.0)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def guidance(compiler: GrammarCompiler) -> Library:
    return compiler._library()


def text(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


def objects(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def call_form(tools: dict[str, Any], *, parallel: bool = False) -> StructuredOutputs:
    choice = ToolChoice("required", tuple(tools), parallel=parallel)
    form = with_tools(None, choice, tools, "response_format", "qwen3_xml")
    assert form is not None
    return form


def compiled(guidance: Library, form: StructuredOutputs) -> Grammar:
    (grammar, _), lengths = worker.tag_grammar(json.loads(form.source[1]), guidance)
    return Grammar(Compiled(guidance, grammar, json.loads(json.dumps(lengths))), b"")


def state_of(grammar: Grammar, tokenizer: Tokenizer) -> GrammarState:
    return GrammarState(grammar, tokenizer.token_bytes, WIDTH)


def takes(state: GrammarState, tokenizer: Tokenizer, data: bytes, *, single: bool = True) -> bool:
    """Whether the answer may go on with these bytes, in the tokens of single bytes or others."""
    pieces = [bytes([byte]) for byte in data]
    found = [
        next(token for token in range(WIDTH) if tokenizer.token_bytes(token) == piece)
        for piece in pieces
    ] if single else tokenizer.encode_plain(data.decode())  # fmt: skip
    for token in found:
        allowed = tokens(state)
        if token not in allowed and len(allowed) > 1:  # a single one is forced: any tokens will do
            return False
        state.accept(token)
        if state.finished:
            return False
    return True


def open_value(grammar: Grammar, tokenizer: Tokenizer) -> GrammarState:
    state = state_of(grammar, tokenizer)
    for token in tokenizer.encode_plain(BEGIN + NAME):
        state.accept(token)
    assert not state.finished
    return state


BOUNDS = [(0, 0), (0, 1), (0, 5), (3, 3), (4, None), (2, 7), (0, 100), (80, None), (80, 100)]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("nullable", [False, True])
def test_a_value_ends_within_its_bounds_and_nowhere_else(
    guidance: Library, tokenizer: Tokenizer, bounds: tuple[int, int | None], nullable: bool
) -> None:
    least, most = bounds
    schema = text(minLength=least) | ({} if most is None else {"maxLength": most})
    if nullable:
        schema = {"anyOf": [schema, {"type": "null"}]}
    grammar = compiled(guidance, call_form({"f": objects(a=schema)}))
    choices = random.Random(str(bounds))
    sizes = {0, least - 1, least, least + 1, (most or least) - 1, most or 90, (most or 90) + 1}
    for size in sorted(size for size in sizes if size >= 0):
        for signs in ("a", "é", "😀", "\n", "<", SIGNS, "\n</parameter"):
            if len(signs) > 10:
                value = (signs * size)[:size]
            else:
                value = "".join(choices.choice(signs) for _ in range(size))
            fitting = least <= size and (most is None or size <= most)
            for single in (True, False):
                state = open_value(grammar, tokenizer)
                ended = takes(state, tokenizer, (value + END).encode(), single=single)
                assert ended == fitting, (value, single)


@pytest.mark.parametrize("word", ["null", "nul", "nulls"])
@pytest.mark.parametrize("bounds", [(0, 3), (0, 5), (5, None), (4, 4), (6, 9)], ids=str)
def test_null_is_no_text_with_a_length(
    guidance: Library, tokenizer: Tokenizer, word: str, bounds: tuple[int, int | None]
) -> None:
    least, most = bounds
    schema = text(minLength=least, **({} if most is None else {"maxLength": most}))
    grammar = compiled(guidance, call_form({"f": objects(a={"anyOf": [schema, {"type": "null"}]})}))
    state = open_value(grammar, tokenizer)
    fitting = word == "null" or least <= len(word) <= (most or 99)
    assert takes(state, tokenizer, (word + END).encode()) == fitting


@pytest.mark.parametrize("bounds", BOUNDS[:7], ids=str)
def test_masks_are_those_of_a_grammar_that_counts(
    guidance: Library,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    bounds: tuple[int, int | None],
) -> None:
    least, most = bounds
    schema = text(minLength=least) | ({} if most is None else {"maxLength": most})
    form = call_form({"f": objects(a=schema, b=text(maxLength=2))}, parallel=True)
    counted = compiled(guidance, form)
    assert counted.compiled.counter is not None
    monkeypatch.setattr(tags, "countable", lambda node: False)
    whole = compiled(guidance, form)
    assert whole.compiled.counter is None
    compared = 0
    for seed in range(20):
        choices = random.Random(seed)
        ours, theirs = state_of(counted, tokenizer), state_of(whole, tokenizer)
        for _ in range(120):
            allowed, expected = tokens(ours), tokens(theirs)
            if len(expected) == 1:  # what is forced is written in the tokenizer's own tokens
                assert expected[0] in allowed
            else:
                assert allowed == expected, seed
                compared += 1
            token = choices.choice(expected)
            ours.accept(token)
            theirs.accept(token)
            assert ours.finished == theirs.finished
            if ours.finished:
                break
    assert compared > 40


SCHEMAS: dict[str, Any] = {
    "short": objects(a=text(maxLength=3)),
    "exact": objects(a=text(minLength=12, maxLength=12)),
    "several": objects(
        a=text(maxLength=9),
        b=text(minLength=5, maxLength=6),
        c={"type": "integer"},
        d=text(minLength=1),
    ),
    "optional": {"type": "object", "properties": {"a": text(maxLength=4), "b": text(minLength=9)}},
    "with a pattern": objects(a=text(pattern="^[a-z ]+@", maxLength=30, minLength=4)),
    "with a format": objects(a=text(format="date", maxLength=30)),
    "an enum": objects(a=text(enum=[f"w{at}" * (1 + at % 9) for at in range(300)], maxLength=12)),
    "or a number": objects(a={"type": ["string", "integer"], "maxLength": 40}),
    "or null": objects(a={"anyOf": [text(minLength=2, maxLength=8), {"type": "null"}]}),
    "or anything": objects(a={"anyOf": [text(maxLength=8), objects(x=text(maxLength=5))]}),
    "a definition": {"$defs": {"T": text(maxLength=7)}, **objects(a={"$ref": "#/$defs/T"})},
    "intersected": objects(a={"allOf": [text(maxLength=7), {"minLength": 6}]}),
    "a list": objects(a={"type": "array", "items": text(maxLength=6), "maxItems": 5000}),
    "nested": objects(a=objects(b={"type": "array", "items": text(minLength=3), "minItems": 2})),
    "other names": {"type": "object", "additionalProperties": text(maxLength=5)},
    "no text": {"type": "object", "properties": {"a": {"not": {}, "maxLength": 3}, "b": text()}},
    "too few for the least": {"properties": {"a": text(minLength=3, maxLength=2), "b": text()}},
    "two shapes": {"anyOf": [objects(a=text(maxLength=2)), objects(a=text(minLength=7), b={})]},
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("seeds", quick([range(12), range(12, 40)], 1), ids=str)
def test_random_answers_fit(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str, seeds: range
) -> None:
    tools = {"f": SCHEMAS[name]}
    grammar, count = compiler.compile(call_form(tools)), 0
    for seed in seeds:
        answer = walk(grammar, tokenizer, random.Random(seed), rolling=seed % 4 == 0, **CLOSINGS)
        if answer is None:
            continue
        parser = OutputParser(tools=tools, form="qwen3_xml", enforced=True)
        pieces = [*parser.feed(answer), *parser.finish()]
        value = json.loads("".join(each.text for each in pieces if each.kind == "tool_arguments"))
        assert fits(SCHEMAS[name], value), (seed, answer)
        count += 1
    assert count >= len(seeds) // 3


@pytest.mark.parametrize("bounds", [{"maxLength": 100_000}, {"minLength": 6_000}], ids=str)
def test_a_bound_of_any_size_holds(
    compiler: GrammarCompiler, tokenizer: Tokenizer, bounds: dict[str, int]
) -> None:
    """Of tools of which each has such texts; the answer is long."""
    tools = {f"f{at}": objects(a=text(**bounds), b=text(**bounds)) for at in range(20)}
    state = state_of(compiler.compile(call_form(tools)), tokenizer)
    for token in tokenizer.encode_plain(BEGIN.replace("=f", "=f7") + NAME):
        state.accept(token)
    [sign] = tokenizer.encode_plain("a")
    for _ in range(max(bounds.values()) if "minLength" in bounds else 20_000):
        state.accept(sign)
    assert takes(state, tokenizer, END.encode())
    state = state_of(compiler.compile(call_form(tools)), tokenizer)
    for token in tokenizer.encode_plain(BEGIN.replace("=f", "=f3") + NAME):
        state.accept(token)
    assert takes(state, tokenizer, END.encode()) == ("maxLength" in bounds)


def test_a_text_that_looks_like_another_call_counts_as_text(
    guidance: Library, tokenizer: Tokenizer
) -> None:
    """What is typed inside of a value without a bound changes no place."""
    tools = {"f": objects(a=text(), b=text(maxLength=3))}
    grammar = compiled(guidance, call_form(tools))
    state = open_value(grammar, tokenizer)
    inner = BEGIN + "<parameter=b>\nmuch longer than three"
    assert takes(state, tokenizer, (inner + END + "<parameter=b>\nabc" + END).encode())
    state = open_value(grammar, tokenizer)
    assert not takes(state, tokenizer, (inner + END + "<parameter=b>\nabcd").encode())


def test_tags_that_may_occur_elsewhere_are_not_counted() -> None:
    def tag(begin: str, **more: Any) -> dict[str, Any]:
        content = {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}
        return {"type": "tag", "begin": begin, "content": content, "end": "</f>", **more}

    def listed(*found: dict[str, Any]) -> dict[str, Any]:
        return {"type": "tags_with_separator", "tags": list(found), "separator": "\n"}

    assert countable(listed(tag("<f>\n"), tag("<g>\n")))
    assert not countable(listed(tag("<f>")))  # a JSON string may have it
    assert not countable(listed(tag("<f>\n"), tag("<f>\n")))
    assert not countable(listed(tag("<f>\n"), tag("<g><f>\n")))
    assert not countable(listed(tag("<f>\n"), tag("<g>\n", content={"type": "any_text"})))
    assert not countable(listed(tag("<f>\n"), tag("<g>\n", content={"type": "grammar"})))


def small_library(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, states: int
) -> GrammarCompiler:
    monkeypatch.setattr(library, "MAX_LEXER_STATES", states)
    return GrammarCompiler(tokenizer, WIDTH, tokenizer.eos_ids, seconds=60.0)


def test_a_lexer_that_is_used_up_is_renewed(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """All answers share its states, which would end every answer once they are used up."""
    compiler = small_library(monkeypatch, tokenizer, 700)
    try:
        patterns = {f"p{at}": text(pattern=f"^[a-z]{{1,80}}-{at}$") for at in range(10)}
        grammar = compiler.compile(StructuredOutputs(json={"properties": patterns}))
        first = grammar.compiled.matcher()[1]
        states = [state_of(grammar, tokenizer) for _ in range(2)]  # some wait meanwhile
        for at in [*range(10), *range(10)]:
            state = state_of(grammar, tokenizer)
            assert takes(state, tokenizer, f'{{"p{at}": "'.encode())
            assert takes(state, tokenizer, b"ab" * 35)
            with state.ahead():
                state.accept(tokenizer.encode_plain("b")[0])
                assert takes(state, tokenizer, f'abc-{at}"'.encode())
            assert takes(state, tokenizer, f'cd-{at}"}}'.encode())
        assert grammar.compiled.matcher()[1] is not first, "the limit is too high for this test"
        for state in states:
            assert takes(state, tokenizer, b'{"p1": "ab-1"}')
    finally:
        compiler.close()


def test_a_limit_that_one_answer_reaches_is_named(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    compiler = small_library(monkeypatch, tokenizer, 300)
    try:
        form = call_form({"f": objects(a=text(pattern=r"^[a-z\n ]+$", minLength=400))})
        state = open_value(compiler.compile(form), tokenizer)
        [sign] = tokenizer.encode_plain("a")
        for _ in range(400):
            if state.allowed() is None:
                break
            state.accept(sign)
        assert "states of its lexer" in state.over_limit
        assert "long" not in state.over_limit
        assert state.allowed() is None
    finally:
        compiler.close()
