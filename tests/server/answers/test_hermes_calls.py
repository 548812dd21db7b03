"""Tool calls as JSON out of a stream of text, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json
from tool_texts import TOOLS, cuts, read_of, told, told_alike

from vlm_serve.preprocess.text.template import ChatTemplate
from vlm_serve.server.answers.json_calls import JsonReader
from vlm_serve.server.answers.output_parser import OutputParser
from vlm_serve.server.answers.pieces import form_of

ARGUMENTS = {"city": 'Pa\\"ris </tool_call> {', "days": 3, "where": {"a": [1, {"b": None}]}}
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
STOP = '<tool_call>{"name":"stop","arguments":{}}</tool_call>'


def parse(pieces: list[str], *, cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """The content, and every call's name and arguments as text."""
    found = told(pieces, cut=cut, tools=TOOLS, form="hermes")
    return found["content"], found["calls"]


def block(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


CASES: list[tuple[str, str, list[tuple[str, Any]]]] = [
    (CALL, "", [("get_weather", ARGUMENTS)]),
    (f"Well.\n\n{CALL}\n{STOP}", "Well.", [("get_weather", ARGUMENTS), ("stop", {})]),
    (block('{"arguments": {"days": 1}, "name": "stop"}'), "", [("stop", {"days": 1})]),
    (block('{"name": "stop"}'), "", [("stop", {})]),
    (block('{"name": "stop", "arguments": null}'), "", [("stop", {})]),
    (block('{"name": "stop", "arguments": "{\\"a\\": 1}"}'), "", [("stop", {"a": 1})]),
    (block('{"name": "stop", "id": {"x": 1}, "arguments": {"a": 1}}'), "", [("stop", {"a": 1})]),
    (block('{"name": "stop", "arguments": {"a": 1, "a": 2}}'), "", [("stop", {"a": 1})]),
    (block('{"name": "fly", "arguments": {}}'), None, []),  # type: ignore[list-item]
    (block("no JSON"), None, []),  # type: ignore[list-item]
    (block('["stop"]'), None, []),  # type: ignore[list-item]
    # lenient, where nothing is in doubt
    (block('{"name": "stop", "arguments": {"a": "b\n\tc"}}'), "", [("stop", {"a": "b\n\tc"})]),
    (block('{"name": "stop", "arguments": "{\\"a\\": \\"b\n\\"}"}'), "", [("stop", {"a": "b\n"})]),
    (block('{"name": "stop", "parameters": {"a": 1}}'), "", [("stop", {"a": 1})]),
    (block('{"name": "stop", "arguments": {}, "parameters": {"a": 1}}'), "", [("stop", {"a": 1})]),
    (block('{"function": {"name": "stop", "arguments": {"a": 1}}}'), "", [("stop", {"a": 1})]),
    (block('[{"name": "stop"}, {"name": "stop"}]'), "", [("stop", {}), ("stop", {})]),
    (block('{"name": "stop"}\n{"name": "stop"}'), "", [("stop", {}), ("stop", {})]),
    (block('{"name": "stop"}, {"name": "stop"}'), "", [("stop", {}), ("stop", {})]),
    (block('{"name": "stop", "arguments": {"a": 1}}}'), "", [("stop", {"a": 1})]),
    (block('{"name": "stop", "arguments": {"a": 1}'), "", [("stop", {"a": 1})]),
    ('<tool_call>{"name": "stop", "arguments": {"a": 1}', "", [("stop", {"a": 1})]),
    ('<tool_call>{"name": "stop"}', "", [("stop", {})]),
    ('<tool_call>{"name": "stop"}<tool_call>{"name": "stop"}', "", [("stop", {})] * 2),
    (
        f'<tool_call>{{"name": "stop", "a": "x{STOP}',
        '<tool_call>{"name": "stop", "a": "x',
        [("stop", {})],
    ),
]
UNREADABLE = [
    block('{"name": "stop", "arguments": {"a": 1, "b": nil}}'),
    block('{"name": "stop", "arguments": {"a": NaN}}'),
    block('{"name": "stop", "arguments": {"a": "b\n'),
    block('{"name": "stop", "arguments": {"a": 1'),
    block("{'name': 'stop'}"),
    block('{"name": "stop", "arguments": [1]}'),
    block('{"name": "stop", "arguments": "no JSON"}'),
    block('{"name": "stop", "arguments": {"a": 1}} and more'),
    block('{"name": "stop", "arguments": {"a": 1}}, "b": 2}'),
    block('{"name": "stop", "arguments": {"a": 1}, "parameters": {"b": 1}}'),
    block('{"name": "write_file", "arguments": {"path": "x.md"}, "content": "a"}'),
    block('{"name": "write_file", "path": "x.md"}'),
    block('{"name": "stop"}\n{"name": "fly"}'),
    block('{"name": "stop", "arguments": {"a": ' + "[" * 5000),
    block("[]"),
    block(""),
    f"Write `{STOP}` for that.",
    f"Like this:\n```\n{STOP}\n```\nor not",
]


@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_calls_and_what_is_none(
    text: str, content: str | None, calls: list[tuple[str, Any]]
) -> None:
    found, said = parse([text])
    assert found == (text if content is None else content)
    assert [(name, json.loads(arguments)) for name, arguments in said] == calls


@pytest.mark.parametrize("text", UNREADABLE, ids=lambda text: str(text)[:80])
def test_what_cannot_be_read_is_text(text: str) -> None:
    assert parse([text]) == parse(list(text)) == (text, [])
    found, calls = parse([f"{text}\n{STOP}"])
    assert (found, calls) == (text, [("stop", "{}")]) or text in found


def test_a_call_may_end_a_thought() -> None:
    options: dict[str, Any] = {"tools": TOOLS, "form": "hermes", "reasoning": True}
    for behind in ("", "\n</think>\n\n"):
        found = told_alike(f"I look.\n{STOP}{behind}", **options)
        assert found == {"reasoning": "I look.", "content": "", "calls": [("stop", "{}")]}
    for text in (
        f"Perhaps\n{STOP}\nor not.",
        '<tool_call>{"name": "stop", "arguments": {"a": "b',
        "A <tool_call> now.",
    ):
        found = told_alike(f"{text}\n</think>\n\n{STOP}", **options)
        assert found == {"reasoning": text, "content": "", "calls": [("stop", "{}")]}


@pytest.mark.parametrize("text", [text for text, *_ in CASES])
@given(seed=st.integers(0, 10**6))
def test_however_it_is_cut(text: str, seed: int) -> None:
    assert parse(cuts(text, seed)) == parse([text]) == parse(list(text))


def test_a_call_is_told_when_it_has_been_read() -> None:
    parser = OutputParser(tools=TOOLS, form="hermes")
    texts = ('<tool_call>{"name": "stop"', ', "arguments": {"a": 1', "}}", "</tool_call>x")
    said = [[piece.text for piece in parser.feed(text)] for text in texts]
    assert said == [[], [], [], ["stop", '{"a": 1}', "x"]]


def test_a_call_that_the_limit_cuts_stays_unfinished() -> None:
    """At every character: never a mark of the form in the content, never a call that looks whole
    and is not."""
    for length in range(1, len(CALL)):
        content, calls = parse([CALL[:length]], cut=True)
        assert content == ""
        if not calls:
            continue
        ((name, arguments),) = calls
        assert name == "get_weather"
        whole = json.dumps(ARGUMENTS)
        assert whole.startswith(arguments) or arguments == "{"
        assert (arguments == whole) == (CALL.index(whole) + len(whole) <= length)
    assert parse(['<tool_call>{"name": "fly", "argu'], cut=True)[0].startswith("<tool_call>")


def test_what_the_limit_cuts_in_a_raw_text_is_the_beginning_of_json() -> None:
    text = '<tool_call>{"name": "stop", "arguments": {"a": "b\n\tc", "d": [tru'
    for length in range(text.index("b") + 1, len(text)):
        found, calls = parse([text[:length]], cut=True)
        assert [name for name, _ in calls] == ["stop"] and not found
        assert from_json(calls[0][1], allow_partial="trailing-strings")["a"].startswith("b")
    found, calls = parse([f'{text[:60]}, "b": nil'], cut=True)
    assert (found, calls) == (f'{text[:60]}, "b": nil', [])


def test_the_limit_cuts_the_second_call_of_a_block() -> None:
    text = '<tool_call>{"name": "stop"}\n{"name": "stop", "arguments": {"a"'
    assert parse([text], cut=True) == ("", [("stop", "{}"), ("stop", '{"a"')])
    assert parse([text[: text.index(', "arg')]], cut=True) == ("", [("stop", "{}"), ("stop", "{")])
    assert parse(['<tool_call>{"name": "stop"}\n{"na'], cut=True) == ("", [("stop", "{}")])
    assert parse(['<tool_call>{"name": "stop"}\n{"name": "fly"'], cut=True)[1] == [("stop", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        block(json.dumps({"name": "stop", "arguments": {"a": "x" * 20_000}})),
        STOP * 500,
        block('{"name": "stop"}' * 500),
        '<tool_call>{"' * 500,
        '<tool_call>{"1","' * 500,
        '<tool_call>{"a": "' * 500,
        "<tool_call>" + "{" * 500,
        f"{STOP} again " * 500,
    ],
    ids=lambda text: str(text)[:40],
)
@pytest.mark.parametrize("reasoning", [None, True])
def test_the_work_grows_with_the_text(
    text: str, reasoning: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_of(monkeypatch, JsonReader)
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
    told(pieces, tools=TOOLS, form="hermes", reasoning=reasoning)
    assert sum(read) <= 6 * len(text)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("no tools", "qwen3_xml"),
        ("<tool_call>\n<function=name>", "qwen3_xml"),
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}', "hermes"),
    ],
)
def test_the_template_says_which_form_it_asks_for(template: str, form: Any) -> None:
    assert ChatTemplate(template).traits.tool_form == form
    assert form_of("auto", form) == form
    assert [form_of(each, form) for each in ("qwen3_xml", "hermes")] == ["qwen3_xml", "hermes"]


def test_half_of_a_pair_of_surrogates_can_be_sent() -> None:
    text = block('{"name": "stop", "arguments": {"a": "\\ud83d, \\ud83d\\ude00"}}')
    wanted = [("stop", '{"a": "\ufffd, \U0001f600"}')]
    assert told_alike(text, tools=TOOLS, form="hermes")["calls"] == wanted
    assert parse([text[: text.rindex("}")]], cut=True)[1] == wanted
