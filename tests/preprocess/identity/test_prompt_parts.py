"""Find the part in which a prompt differs from an earlier one, whatever its client's form."""

from __future__ import annotations

from typing import Any

import pytest

from vlm_serve.preprocess.identity.prompt_parts import PromptParts
from vlm_serve.preprocess.reading.reader import read_conversation

SYSTEM = "You are terse."
TOOL = {"name": "find", "description": "Finds.", "input_schema": {"type": "object"}}
PICTURE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="},
}
MARK = {"cache_control": {"type": "ephemeral"}}


def say(role: str, *parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]
    return {"role": role, "content": content}


ASKED = [say("user", PICTURE, "What is it?")]
LATER = [*ASKED, say("assistant", "A cat."), say("user", "Which colour?")]


def parts(messages: list[Any], model: str = "", **fields: Any) -> PromptParts:
    settings = {name: fields.pop(name, None) for name in ("reasoning_effort", "verbosity")}
    kwargs = fields.pop("kwargs", {})
    body = {"messages": messages, "system": SYSTEM, "tools": [TOOL], "max_tokens": 9, **fields}
    conversation = read_conversation("messages", body)
    conversation.template_kwargs |= kwargs
    return PromptParts.of(conversation, model, **settings)


BEFORE = parts(ASKED).kept()


def test_a_prompt_that_was_only_appended_to_begins_with_the_earlier_one() -> None:
    assert BEFORE.change(parts(ASKED)) == BEFORE.change(parts(LATER)) == ""
    assert len(parts(LATER).turns) == 4 and len(BEFORE.turns) == 1, "a record is small"


@pytest.mark.parametrize(
    ("now", "change"),
    [
        (parts(LATER, model="other"), "model"),
        (parts(LATER, tools=[{**TOOL, "name": "look"}]), "tools"),
        (parts(LATER, tools=None), "tools"),
        (parts(LATER, system="You are kind."), "system"),
        (parts(LATER, system=None), "system"),
        (parts(LATER, kwargs={"preserve_thinking": True}), "options"),
        (parts(LATER, kwargs={"effort": "low"}, reasoning_effort="low"), "reasoning_effort"),
        (parts(LATER, kwargs={"verbosity": "low"}, verbosity="low"), "verbosity"),
        (parts([say("user", PICTURE, "What is this?"), *LATER[1:]]), "messages"),
        (parts([say("user", "What is it?"), *LATER[1:]]), "messages"),
        (parts([say("user", "Before."), *LATER]), "messages"),
        (parts([say("assistant", "A cat.")]), "messages"),
    ],
)
def test_the_first_part_that_differs_is_named(now: PromptParts, change: str) -> None:
    assert BEFORE.change(now) == change


@pytest.mark.parametrize(
    "now",
    [
        parts(LATER, system=[{"type": "text", "text": SYSTEM, **MARK}]),
        parts(LATER, tools=[{**TOOL, **MARK}]),
        parts([say("user", {**PICTURE, **MARK}, {"type": "text", "text": "What is it?", **MARK})]),
        parts(LATER, reasoning_effort="low"),
        parts(LATER, kwargs={"enable_thinking": False}),
    ],
)
def test_marks_forms_and_what_only_the_answer_needs_are_no_change(now: PromptParts) -> None:
    assert BEFORE.change(now) == ""


def test_the_first_difference_counts() -> None:
    assert BEFORE.change(parts([say("user", "x")], model="m", system="s", tools=None)) == "model"
    assert BEFORE.change(parts([say("user", "x")], system="s", tools=None)) == "tools"
    assert BEFORE.change(parts([say("user", "x")], system="s")) == "system"


def test_lone_halves_of_characters_are_no_error() -> None:
    tool = {**TOOL, "description": "\ud800"}
    assert parts([say("user", "\ud800")], tools=[tool]).change(parts(ASKED)) == "tools"
