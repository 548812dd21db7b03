"""Requests for decisions: their inputs, their questions, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.decisions.prompt import conversation_about
from vlm_serve.preprocess.reading.decisions import assets_of, read_questions, read_system_one
from vlm_serve.preprocess.reading.reader import read_conversation

IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
SHOWN = {"type": "image", "image": "image"}


def said(content: Any, question: dict[str, Any], labels: list[str]) -> Any:
    """Return the content of the last message."""
    about = read_conversation("decisions", {"input": content})
    (read,) = read_questions([question], [])
    return conversation_about(about, read, labels).messages[-1]["content"]


def test_a_question_follows_the_input_in_its_message() -> None:
    choices = [{"value": True}, {"value": "true", "description": "the word"}]
    question = {"type": "choice", "instructions": "Which?", "choices": choices}
    asked = "\n\nWhich?\nA. true\nB. true: the word\n"
    asked += "Answer with the letter of the option that fits best (A to B) only."
    assert said("It is so.", question, ["A", "B"]) == "It is so." + asked
    data = {"type": "input_json", "data": {"a": [1, "é"]}}
    content = [{"role": "user", "content": [data, IMAGE]}]
    shown = [{"type": "text", "text": '{"a": [1, "é"]}'}, SHOWN, {"type": "text", "text": asked}]
    assert said(content, question, ["A", "B"]) == shown


def test_levels_and_pictures_in_instructions() -> None:
    levels = [{"label": "low"}, {"label": "high", "description": "at once"}]
    instructions = [{"type": "input_text", "text": "Like "}, IMAGE]
    question = {"type": "score", "instructions": instructions, "levels": levels}
    behind = "\nA. low\nB. high: at once\n"
    behind += "Answer with the letter of the level that fits best (A to B) only."
    first = {"type": "text", "text": "So.\n\nLike "}
    assert said("So.", question, ["A", "B"]) == [first, SHOWN, {"type": "text", "text": behind}]


def test_pictures_take_the_places_that_stand_for_them() -> None:
    assets = {"img": {"data_base64": "AAAA"}, "img-1": {"data_base64": "BBBB", "format": "jpeg"}}
    body = {"state": {"photo": "img-1"}, "assets": assets}
    about = read_conversation("systemone", body)
    assert [part["type"] for part in about.messages[0]["content"]] == ["text", "image", "text"]
    question = {"type": "choice", "instructions": "as img?", "criteria": {"img-1": None, "b": 1}}
    (read,) = read_system_one({"q": question}, assets_of(body))
    asked = conversation_about(about, read, ["A", "B"])
    assert [part.source for part in asked.media] == [
        f"data:image/{kind};base64,{data}"
        for kind, data in (("jpeg", "BBBB"), ("png", "AAAA"), ("jpeg", "BBBB"))
    ]
    assert [part.source[11:15] for part in about.media] == ["jpeg"]


def option(**fields: Any) -> dict[str, Any]:
    return {"type": "choice", "instructions": "?", **fields}


TWICE = [{"value": "a"}, {"value": "a"}]


@pytest.mark.parametrize(
    ("questions", "param"),
    [
        ([], "questions"),
        ([{"type": "predicate", "instructions": "?"}] * 401, "questions"),
        ([{"type": "noul", "instructions": "?"}], "questions[0].type"),
        ([{"type": "predicate"}], "questions[0].instructions"),
        ([{"type": "predicate", "instructions": "?", "name": 3}], "questions[0].name"),
        ([option(choices=[{"value": "a"}])], "questions[0].choices"),
        ([option(choices=[{"value": str(n)} for n in range(256)])], "questions[0].choices"),
        ([option(choices=TWICE)], "questions[0].choices[1]"),
        ([option(choices=[{"value": 3}, {"value": 4}])], "questions[0].choices[0]"),
        ([option(type="score", levels=[{"label": 3}] * 2)], "questions[0].levels[0].label"),
        ({"q": {"type": "predicate"}}, "questions.q.type"),
        ({"q": {"type": "choice"}}, "questions.q.criteria"),
        ({"q": {"type": "score", "criteria": []}}, "questions.q.criteria"),
        ({"q": {"type": "noul", "criteria": {"maybe": ""}}}, "questions.q.criteria"),
    ],
)
def test_bad_questions_are_named(questions: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        if isinstance(questions, dict):
            read_system_one(questions, {})
        else:
            read_questions(questions, [])
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("api", "body", "param"),
    [
        ("decisions", {}, "input"),
        ("decisions", {"input": 3}, "input"),
        ("decisions", {"input": []}, "input"),
        (
            "decisions",
            {"input": [{"role": "user", "content": [{"type": "input_json", "data": 3}]}]},
            "input[0].content[0]",
        ),
        ("systemone", {}, "state"),
        ("systemone", {"state": "x", "assets": {"x": {"url": "y"}}}, "assets.x.data_base64"),
        ("systemone", {"state": "x", "assets": {"": {"data_base64": "y"}}}, "assets"),
    ],
)
def test_bad_inputs_are_named(api: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        read_conversation(api, body)
    assert raised.value.param == param


def test_json_may_be_as_deep_as_the_error_says() -> None:
    deep: Any = []
    for levels in range(1, 70):
        part = {"type": "input_json", "data": deep}
        body = {"input": [{"role": "user", "content": [part]}]}
        if levels <= 64:
            assert read_conversation("decisions", body).messages
        else:
            with pytest.raises(InvalidRequestError, match="nested deeper than 64 levels"):
                read_conversation("decisions", body)
        deep = [deep]
