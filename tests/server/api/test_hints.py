"""Refusals and headers that say what to send instead."""

from __future__ import annotations

from typing import Any

import pytest
from serving import RunningServer, chat_body

from vlm_serve.preprocess.text.template import TemplateTraits


@pytest.mark.parametrize(
    ("path", "field", "value", "instead"),
    [
        ("/v1/chat/completions", "guided_json", {}, "structured_outputs"),
        ("/v1/responses", "max_tokens", 5, "max_output_tokens"),
        ("/v1/responses", "max_completion_tokens", 5, "max_output_tokens"),
        ("/v1/messages", "max_completion_tokens", 5, "max_tokens"),
        ("/v1/chat/completions", "suffix", "x", None),
        ("/v1/messages", "guided_regex", "x", None),
    ],
)
def test_a_refused_field_names_its_like(
    fake: RunningServer, path: str, field: str, value: Any, instead: str | None
) -> None:
    body = chat_body() | {"input": "x", "max_tokens": 4} if "chat" not in path else chat_body()
    if path == "/v1/responses":
        body = {"input": "x"}
    answer = fake.post(path, body | {field: value})
    hint = f": use {instead}" if instead else ""
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"{field} is not implemented by this server{hint}"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/responses", "/v1/responses"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/completions/", "/v1/completions"),
        ("/v2/chat/completions", None),
    ],
)
def test_a_wrong_base_url_is_recognised(fake: RunningServer, path: str, meant: str | None) -> None:
    answer = fake.post(path, chat_body())
    hint = f": did you mean {meant}?" if meant else ""
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"there is no such route{hint}"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/audio/transcriptions", "no audio"), ("/v1/audio/speech", "no audio"),
        ("/v1/images/generations", "no pictures"), ("/v1/moderations", "no model for moderation"),
        ("/v1/responses/compact", "no such route"), ("/v1/models/compact", "no such route"),
        ("/v1/responses/resp_1/cancel", "no such route"), ("/v1/audiobooks", "no such route"),
    ],
)  # fmt: skip
def test_routes_of_other_models_and_of_other_servers_are_named(
    fake: RunningServer, path: str, said: str
) -> None:
    answer = fake.post(path, {})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert said in message and message.startswith("there is no such route")
    assert len(message) < 30 or said != "no such route"


@pytest.mark.parametrize(
    "part",
    [{"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
     {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,aGk="}}],
)  # fmt: skip
def test_audio_is_named_as_what_the_server_does_not_hear(
    fake: RunningServer, part: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": [part]}]
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        answer = fake.post(path, {field: messages})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == f"{field}[0].content[0].type" and "audio" in error["message"]


def test_a_route_names_its_methods(fake: RunningServer) -> None:
    answer = fake.client.get("/v1/chat/completions")
    assert answer.status_code == 405 and "it takes POST" in answer.text


def test_variables_that_the_template_does_not_read_are_named(fake: RunningServer) -> None:
    fake.engine.preprocessor.template_traits = TemplateTraits(frozenset({"enable_thinking"}))
    given = {"enable_thinking": True, "enable_thinkin": True}
    answer = fake.chat(chat_template_kwargs=given)
    named = answer.headers["x-vlm-serve-ignored-fields"]
    assert named == "chat_template_kwargs.enable_thinkin"
    assert fake.engine.preprocessor.calls[-1]["chat_template_kwargs"] == given
    answer = fake.chat(chat_template_kwargs={"enable_thinking": True})
    assert "x-vlm-serve-ignored-fields" not in answer.headers


IMAGE = "data:image/png;base64,aGk="
MARK = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}
CONTROL = {"cache_control": {"type": "ephemeral"}}
WHOLE = {
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit", "pace": "slow"},
    "prompt_cache_retention": "24h",
}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", **CONTROL, "content": [
                {"type": "image_url", "image_url": {"url": IMAGE}, **MARK},
                {"type": "text", "text": "hi", **MARK},
            ]}], "tools": [{"type": "function", "function": {"name": "look"}, **CONTROL}],
             "prediction": {"type": "content", "content": [
                {"type": "text", "text": "hi", **MARK},
             ]}} | WHOLE,
            [
                "prompt_cache_key",
                "prompt_cache_retention",
                "prediction.content[0].prompt_cache_breakpoint",
                "prompt_cache_options.pace",
            ],
        ),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": IMAGE}, **CONTROL},
            ]}]},
            [],
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [
                {"type": "input_image", "image_url": IMAGE, "detail": "auto", **MARK},
                {"type": "input_text", "text": "hi", **MARK},
            ]}], "tools": [{"type": "function", "name": "look", **MARK}]} | WHOLE,
            [
                "prompt_cache_key",
                "prompt_cache_retention",
                "prompt_cache_options.pace",
            ],
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "system": [{"type": "text", "text": "S", **CONTROL}],
                "tools": [{"name": "look", "input_schema": {}, **CONTROL}],
                "messages": [{"role": "user", "content": [
                    {"type": "image", "source": {"type": "url", "url": IMAGE}, **CONTROL},
                ]}],
                **CONTROL,
            },
            [],
        ),
    ],
)  # fmt: skip
def test_cache_marks_are_taken_and_named_where_they_have_no_effect(
    fake: RunningServer, path: str, body: dict[str, Any], named: list[str]
) -> None:
    answer = fake.post(path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-vlm-serve-ignored-fields", "") == ", ".join(named)
    call = fake.engine.preprocessor.calls[-1]
    assert "cache" not in f"{call['messages']}{call.get('tools')}"


def test_a_file_of_unknown_type_says_what_names_it(fake: RunningServer) -> None:
    for file, status, said in (
        ({"file_data": "JVBERi0="}, 400, "give filename, or a data: URL"),
        ({"file_id": "file-1"}, 404, "there is no medium 'file_id:file-1', or no longer"),
    ):
        content = [{"type": "file", "file": file}]
        answer = fake.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}
        )
        assert answer.status_code == status and said in answer.json()["error"]["message"]
