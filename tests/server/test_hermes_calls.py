"""Tool calls as JSON out of a stream of text, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_texts import TOOLS, cuts

from vlm_serve.preprocess.template import ChatTemplate
from vlm_serve.server.output_parser import OutputParser
from vlm_serve.server.pieces import form_of

ARGUMENTS = {"city": 'Pa\\"ris </tool_call> {', "days": 3, "where": {"a": [1, {"b": None}]}}
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
STOP = '<tool_call>{"name":"stop","arguments":{}}</tool_call>'


def parse(pieces: list[str], *, cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """The content, and every call's name and arguments as text."""
    parser = OutputParser(tools=TOOLS, form="hermes")
    found = [piece for text in pieces for piece in parser.feed(text)] + parser.finish(cut=cut)
    calls: dict[int, list[str]] = {}
    for piece in found:
        if piece.kind == "tool_name":
            calls[piece.call] = [piece.text, ""]
        elif piece.kind == "tool_arguments":
            calls[piece.call][1] += piece.text
    content = "".join(piece.text for piece in found if piece.kind == "content")
    return content, [(name, arguments) for name, arguments in calls.values()]


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
    (block('{"name": "stop", "arguments": {"a": 1, "b": nil}}'), "", [("stop", {"a": 1})]),
    (block('{"name": "stop", "arguments": {"a": NaN}}'), "", [("stop", {})]),
    (block('{"name": "stop", "arguments": {"a": "b\n'), "", [("stop", {})]),
    (block('{"name": "stop", "arguments": {"a": 1'), "", [("stop", {})]),
]


@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_calls_and_what_is_none(
    text: str, content: str | None, calls: list[tuple[str, Any]]
) -> None:
    found, said = parse([text])
    assert found == (text if content is None else content)
    assert [(name, json.loads(arguments)) for name, arguments in said] == calls


@pytest.mark.parametrize("text", [text for text, *_ in CASES])
@given(seed=st.integers(0, 10**6))
def test_however_it_is_cut(text: str, seed: int) -> None:
    assert parse(cuts(text, seed)) == parse([text]) == parse(list(text))


def test_arguments_come_as_they_are_complete() -> None:
    parser = OutputParser(tools=TOOLS, form="hermes")
    texts = (
        '<tool_call>{"name": "stop"',
        ', "arguments": {"a": 1',
        ', "b"',
        ": 2}",
        "}</tool_call>x",
    )
    said = [[piece.text for piece in parser.feed(text)] for text in texts]
    assert said == [[], ["stop"], ['{"a": 1'], [', "b": 2'], ["}", "x"]]


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


def test_a_long_text_is_looked_at_once() -> None:
    long = "x" * 200_000
    pieces = [block(json.dumps({"name": "stop", "arguments": {"a": long}}))]
    pieces = [pieces[0][at : at + 50] for at in range(0, len(pieces[0]), 50)]
    _, ((_, arguments),) = parse(pieces)
    assert json.loads(arguments) == {"a": long}


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("no tools", "qwen3_xml"),
        ("<tool_call>\n<function=name>", "qwen3_xml"),
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}', "hermes"),
    ],
)
def test_the_template_says_which_form_it_asks_for(template: str, form: Any) -> None:
    assert ChatTemplate(template).tool_form == form
    assert form_of("auto", form) == form
    assert [form_of(each, form) for each in ("qwen3_xml", "hermes")] == ["qwen3_xml", "hermes"]
