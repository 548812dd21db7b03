"""One conversation gives one prompt in every API's forms of content, for every kind of template."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chat_templates
import pytest
from conversation import build
from pydantic import BaseModel

from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.server.api.messages import MessagesRequest
from vlm_serve.server.api.responses.request import ResponsesRequest
from vlm_serve.server.api.shared.chat_request import ChatCompletionRequest

MODELS: dict[str, type[BaseModel]] = {
    "chat": ChatCompletionRequest,
    "messages": MessagesRequest,
    "responses": ResponsesRequest,
}

OWN = {
    "skips lists": chat_templates.SKIPS_LISTS,
    "adds strings": chat_templates.ADDS_STRINGS,
    "users alone": chat_templates.USERS_ALONE,
    "parts alone": chat_templates.PARTS_ALONE,
}
ARGUMENTS = '{"at": 1}'
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}
Form = Callable[[str], Any]


@pytest.fixture(params=[*OWN, *chat_templates.PUBLISHED])
def made(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path
) -> Iterator[Preprocessor]:
    source = OWN.get(request.param) or chat_templates.published(request.param)
    if not source:
        pytest.skip(f"{request.param} is not beside the project")
    preprocessor = build(chat_templates.with_template(checkpoint, tmp_path / "c", source))
    yield preprocessor
    preprocessor.close()


def plain(text: str) -> str:
    return text


def chat(form: Form, nothing: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": form("S")},
        {"role": "user", "content": form("U")},
        {"role": "assistant", "content": form("A")},
        {"role": "user", "content": form("V")},
        {"role": "assistant", "content": nothing, "tool_calls": [CALL], "name": None},
        {"role": "tool", "tool_call_id": "c", "content": form("T")},
    ]
    return {"messages": messages}


def messages(form: Form, output: Any) -> dict[str, Any]:
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {"at": 1}}
    said = [
        {"role": "user", "content": form("U")},
        {"role": "assistant", "content": form("A")},
        {"role": "user", "content": form("V")},
        {"role": "assistant", "content": [use]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": output}],
        },
    ]
    return {"max_tokens": 1, "system": form("S"), "messages": said}


def responses(form: Form, answer: Form) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": ARGUMENTS}
    items = [
        {"role": "system", "content": form("S")},
        {"role": "user", "content": form("U")},
        {"type": "message", "role": "assistant", "content": answer("A")},
        {"role": "user", "content": form("V")},
        call,
        {"type": "function_call_output", "call_id": "c", "output": form("T")},
    ]
    return {"input": items}


def parts(kind: str) -> Form:
    return lambda text: [{"type": kind, "text": text}]


def ids(made: Preprocessor, api: str, body: dict[str, Any]) -> tuple[int, ...]:
    MODELS[api].model_validate(body)
    return made.prepare(read_conversation(api, body)).token_ids


def test_text_and_parts_are_one_prompt_in_every_api(made: Preprocessor) -> None:
    expected = ids(made, "chat", chat(plain, ""))
    text = made.tokenizer.decode(expected)
    assert all(text.count(f"{said}") for said in ("S", "U", "A", "V", "T", "look"))
    for form in (plain, parts("text")):
        nothings: tuple[Any, ...] = (None, "", [])
        for nothing in nothings:
            body = chat(form, nothing)
            assert ids(made, "chat", body) == expected
        for output in ("T", [{"type": "text", "text": "T"}]):
            body = messages(form, output)
            assert ids(made, "messages", body) == expected
    for form, answer in (
        (plain, plain),
        (parts("input_text"), parts("output_text")),
        (parts("text"), parts("text")),
    ):
        assert ids(made, "responses", responses(form, answer)) == expected


def test_several_parts_are_one_prompt_in_every_api(made: Preprocessor) -> None:
    def two(kind: str) -> Form:
        return lambda text: [{"type": kind, "text": each} for each in (text, "more")]

    expected = ids(made, "chat", chat(two("text"), None))
    assert made.tokenizer.decode(expected).count("more") == 5
    body = messages(two("text"), two("text")("T"))
    assert ids(made, "messages", body) == expected
    assert ids(made, "responses", responses(two("input_text"), two("output_text"))) == expected


def test_null_is_empty_text(made: Preprocessor) -> None:
    expected = ids(made, "chat", chat(lambda _: "", ""))
    body = chat(lambda _: None, None)
    assert ids(made, "chat", body) == expected
    assert ids(made, "responses", responses(lambda _: None, lambda _: None)) == expected
    body = messages(lambda _: None, None)
    without = chat(lambda _: "", "")["messages"][1:]
    expected = ids(made, "chat", {"messages": without})
    assert ids(made, "messages", body) == expected
