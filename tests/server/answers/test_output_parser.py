"""Reasoning and tool calls out of a stream of text, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json
from tool_texts import TOOLS, cuts, told, told_alike

from vlm_serve.server.answers.output_parser import OutputParser
from vlm_serve.server.answers.pieces import Piece

CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


def parse(pieces: list[str], **options: Any) -> dict[str, Any]:
    found = told(pieces, **options)
    calls = [(name, json.loads(arguments)) for name, arguments in found["calls"]]
    return found | {"calls": calls}


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("plain text", {}, {"content": "plain text", "reasoning": "", "calls": []}),
    (CALL, {}, {"content": CALL, "reasoning": "", "calls": []}),
    (
        "I think\n</think>\n\nParis.",
        {"reasoning": True},
        {"content": "Paris.", "reasoning": "I think", "calls": []},
    ),
    (
        "<think>\nI think\n</think>\n\nParis.",
        {"reasoning": False},
        {"content": "Paris.", "reasoning": "I think", "calls": []},
    ),
    (
        "no thought <think>here</think>",
        {"reasoning": False},
        {"content": "no thought <think>here</think>", "reasoning": "", "calls": []},
    ),
    ("never ends", {"reasoning": True}, {"content": "", "reasoning": "never ends", "calls": []}),
    ("<thin", {"reasoning": False}, {"content": "<thin", "reasoning": "", "calls": []}),
    (
        "Let me see.\n\n" + CALL,
        {"tools": TOOLS},
        {
            "content": "Let me see.",
            "reasoning": "",
            "calls": [("get_weather", {"city": "Paris", "days": 3})],
        },
    ),
    (
        CALL + "\n" + CALL + "\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
        {"tools": TOOLS},
        {
            "content": "",
            "reasoning": "",
            "calls": [("get_weather", {"city": "Paris", "days": 3})] * 2 + [("stop", {})],
        },
    ),
    (
        "why\n</think>\n\n" + CALL,
        {"tools": TOOLS, "reasoning": True},
        {
            "content": "",
            "reasoning": "why",
            "calls": [("get_weather", {"city": "Paris", "days": 3})],
        },
    ),
    (  # only the end of the block is missing
        CALL[: CALL.index("\n</tool_call>")],
        {"tools": TOOLS},
        {"content": "", "reasoning": "", "calls": [("get_weather", {"city": "Paris", "days": 3})]},
    ),
    (  # an unknown function is no call
        "<tool_call>\n<function=rm>\n</function>\n</tool_call>",
        {"tools": TOOLS},
        {
            "content": "<tool_call>\n<function=rm>\n</function>\n</tool_call>",
            "reasoning": "",
            "calls": [],
        },
    ),
    (
        "a < b and <tool_box> too",
        {"tools": TOOLS},
        {"content": "a < b and <tool_box> too", "reasoning": "", "calls": []},
    ),
    (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\ntwo\nlines <b>\n</parameter>\n"
        "<parameter=city>\nagain\n</parameter>\n</function>\n</tool_call>",
        {"tools": TOOLS},
        {"content": "", "reasoning": "", "calls": [("get_weather", {"city": "two\nlines <b>"})]},
    ),
]


@pytest.mark.parametrize(("text", "options", "wanted"), CASES)
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    text: str, options: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert parse([text], **options) == wanted
    assert parse(list(text), **options) == wanted
    for seed in range(50):
        assert parse(cuts(text, seed), **options) == wanted


XML_PARTS = ["<tool_call>", "</tool_call>", "<function=stop>", "<function=write_file>"]
XML_PARTS += ["<function=rm>", "</function>", "<parameter=path>", "<parameter=x>", "</parameter>"]
XML_PARTS += ["</think>", "<think>", "<thi", "```xml\n", *"a <>`\n"]
JSON_PARTS = ["<tool_call>", "</tool_call>", '{"name": "stop"', ', "arguments": ', '{"a": "b', '"']
JSON_PARTS += ["</think>", "<think>", "<thi", "true", *"}{[]\\,:1 \n"]


@pytest.mark.parametrize(("form", "parts"), [("qwen3_xml", XML_PARTS), ("hermes", JSON_PARTS)])
@given(data=st.data())
def test_any_text_is_told_alike_in_any_cut(form: Any, parts: list[str], data: Any) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=24)))
    if data.draw(st.booleans()):
        start = "<function=write_file>\n<parameter=path>" if form == "qwen3_xml" else parts[2]
        text = f"<tool_call>\n{start}\n{text}"
    options: dict[str, Any] = {
        "form": form,
        "tools": data.draw(st.sampled_from([TOOLS, None])),
        "reasoning": data.draw(st.sampled_from([None, True, False])),
        "cut": data.draw(st.booleans()),
        "parallel": data.draw(st.booleans()),
        "enforced": data.draw(st.booleans()),
    }
    whole = told([text], **options)
    assert told(list(text), **options) == whole
    assert told(cuts(text, data.draw(st.integers(0, 99))), **options) == whole
    for _, arguments in whole["calls"]:
        from_json(arguments, allow_partial=options["cut"])
    if options["reasoning"] is None and not options["cut"] and not whole["calls"]:
        assert whole["content"] == text


@given(st.text(alphabet="ab <>\n"))
def test_text_without_markers_is_not_changed(text: str) -> None:
    assert parse(list(text), tools=TOOLS)["content"] == text


def test_text_is_released_as_soon_as_it_is_certain() -> None:
    parser = OutputParser(tools=TOOLS)
    assert parser.feed("abc") == [Piece("content", "abc")]
    assert parser.feed(" ") == []
    assert parser.feed("d<") == [Piece("content", " d")]
    assert parser.feed("e") == [Piece("content", "<e")]


def test_a_call_is_told_when_it_has_been_read() -> None:
    parser = OutputParser(tools=TOOLS)
    head, end = CALL[:-1], CALL[-1:]
    assert parser.feed("Well.\n" + head) == [Piece("content", "Well.")]
    assert parser.feed(end) == []  # text behind it could show that the value goes on
    name = Piece("tool_name", "get_weather", 0)
    arguments = Piece("tool_arguments", '{"city": "Paris", "days": 3}', 0)
    assert parser.feed("\n<tool_call>\n<function=stop>\n") == [name, arguments]
    assert parser.feed("</function>\n</tool_call>") == [
        Piece("tool_name", "stop", 1),
        Piece("tool_arguments", "{}", 1),
    ]
    assert parser.feed(" That is") == [Piece("content", "That is")]


STOP = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
STOPPED = [("stop", "{}")]


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"I look.\n{STOP}", "I look.", "", STOPPED),
        (f"I look.\n{STOP}\n</think>\n\nDone.", "I look.", "Done.", STOPPED),
        (f"I look.\n{STOP}\n{STOP}\n</think>", "I look.", "", STOPPED * 2),
        (f"I look.\n{STOP}\nNow I wait.", "I look.", "Now I wait.", STOPPED),
        (STOP.removeprefix("<tool_call>\n"), "", "", STOPPED),
        # weighed, quoted, or none
        (f"Perhaps\n{STOP}\nor not.\n</think>\n\nNo.", f"Perhaps\n{STOP}\nor not.", "No.", []),
        (f"Perhaps\n{STOP}\nYes:\n{STOP}", f"Perhaps\n{STOP}\nYes:", "", STOPPED),
        (f"Perhaps\n{STOP}\nno.\n</think>\n\n{STOP}", f"Perhaps\n{STOP}\nno.", "", STOPPED),
        (f"I write `{STOP}`.\n</think>\n\nNo.", f"I write `{STOP}`.", "No.", []),
        (f"A <tool_call> now.\n</think>\n\n{STOP}", "A <tool_call> now.", "", STOPPED),
        ("<tool_call>\n<function=rm>\n</think>\nNo.", "<tool_call>\n<function=rm>", "No.", []),
        (
            f"<tool_call>\n<function=stop>\n<parameter=a>\n1\n</think>\n\n{STOP}",
            "<tool_call>\n<function=stop>\n<parameter=a>\n1",
            "",
            STOPPED,
        ),
        (f"{STOP}\n{STOP[:30]}\n</think>\n\nNo.", f"{STOP}\n{STOP[:30]}", "No.", []),
    ],
)
def test_a_call_may_end_a_thought(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    found = told_alike(text, reasoning=True, tools=TOOLS)
    assert found == {"reasoning": reasoning, "content": content, "calls": calls}
    alone = told_alike(text, reasoning=True)
    assert alone["calls"] == []
    assert alone["reasoning"] == text.split("</think>")[0].rstrip()


def test_a_thought_that_is_cut_makes_no_half_call() -> None:
    text = f"I look.\n{CALL}"
    for length in range(len(text) - len("\n</function>\n</tool_call>")):
        found = told_alike(text[:length], reasoning=True, tools=TOOLS, cut=True)
        assert found["calls"] == []
        assert text[:length].startswith(found["reasoning"])


def test_an_enforced_answer_is_what_follows_the_thought() -> None:
    text = f"I look.\n{STOP}\n</think>\n\n"
    options: dict[str, Any] = {"reasoning": True, "tools": TOOLS, "enforced": True}
    found = told_alike(text + STOP, **options)
    assert found == {"reasoning": f"I look.\n{STOP}", "content": "", "calls": STOPPED}
    assert told_alike(f"I look.\n{STOP}", **options)["calls"] == STOPPED


def test_where_one_call_is_allowed_there_is_one() -> None:
    options: dict[str, Any] = {"tools": TOOLS, "parallel": False}
    found = told_alike(f"{STOP}\n{STOP}", **options)
    assert found == {"reasoning": "", "content": STOP, "calls": STOPPED}
    found = told_alike(f"{STOP}\n{STOP}", reasoning=True, **options)
    assert found == {"reasoning": STOP, "content": "", "calls": STOPPED}
    both = '<tool_call>{"name": "stop"}{"name": "stop"}</tool_call>'
    found = told_alike(both, form="hermes", **options)
    assert found == {"reasoning": "", "content": both, "calls": []}


@pytest.mark.parametrize("behind", ["", "\n", "\n<", "\n</think", "\n</think>", "\n<tool_c"])
def test_what_the_limit_leaves_of_a_mark_does_not_undo_calls(behind: str) -> None:
    found = told_alike(f"Hm.\n{CALL}{behind}", reasoning=True, tools=TOOLS, cut=True)
    assert found["reasoning"] == "Hm." and found["content"] == ""
    assert len(found["calls"]) == 1


def test_a_repeated_mark_is_no_part_of_the_thought() -> None:
    found = told_alike("<think>\nhm\n</think>\n\nhello", reasoning=True)
    assert found == {"reasoning": "hm", "content": "hello", "calls": []}


@pytest.mark.parametrize("text", ["\n    return 1", " a", "  <b>", "\n\n", " "])
@pytest.mark.parametrize("continued", [True, False])
def test_white_space_that_an_answer_begins_with_is_kept(text: str, continued: bool) -> None:
    """Behind a thought there is none that says anything; elsewhere it may be an indentation."""
    for tools in (None, TOOLS):
        for reasoning in (None, False):
            options: dict[str, Any] = {"reasoning": reasoning, "continued": continued}
            assert told_alike(text, tools=tools, **options)["content"] == text


def test_a_continued_thought_keeps_its_white_space() -> None:
    found = told_alike(" see\n</think>\n\nRed.", reasoning=True, continued=True)
    assert found == {"reasoning": " see", "content": "Red.", "calls": []}


def test_text_that_was_held_back_is_told_as_it_was_written() -> None:
    text = "a \n\n<tool_call>\n \nb\n <function=rm> \n"
    assert told_alike(text, tools=TOOLS)["content"] == text


@pytest.mark.parametrize(
    ("behind", "content"),
    [
        ("\n\n    return 1", "    return 1"),
        ("\n\treturn 1\n", "\treturn 1\n"),
        (" Paris", "Paris"),
        ("   \n \n  a\n    b", "  a\n    b"),
        ("\n\n", ""),
    ],
)
def test_the_first_line_behind_a_thought_keeps_its_indentation(behind: str, content: str) -> None:
    for tools in (None, TOOLS):
        found = told_alike(f"hm\n</think>{behind}", reasoning=True, tools=tools)
        assert found == {"reasoning": "hm", "content": content, "calls": []}
