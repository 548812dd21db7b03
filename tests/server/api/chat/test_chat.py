"""/v1/chat/completions over a scripted engine: the forms of requests and responses."""

from __future__ import annotations

from typing import Any

import pytest
from serving import RunningServer, chat_body

from vlm_serve.preprocess.text.template import TemplateTraits


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def test_a_whole_answer(fake: RunningServer) -> None:
    response = fake.chat(model="test-model")
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "test-model"
    assert body["id"].startswith("chatcmpl-")
    assert body["created"] > 1_600_000_000
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello, world!", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 3,
        "cache_write_tokens": 2,
        "image_tokens": 0,
        "video_tokens": 0,
    }
    assert "cache_report" not in body
    assert response.headers["x-request-id"] == body["id"].removeprefix("chatcmpl-")
    assert "x-vlm-serve-ignored-fields" not in response.headers


def test_a_stream_has_a_role_then_text_then_one_finish(fake: RunningServer) -> None:
    chunks = fake.stream_chat()
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(chunks) == "Hello, world!"
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes[-1] == "stop"
    assert not any(finishes[:-1])
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_in_a_stream_comes_last_and_only_when_asked_for(fake: RunningServer) -> None:
    whole = fake.chat().json()["usage"]
    chunks = fake.stream_chat(stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_continuous_usage_counts_up(fake: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk["usage"]["completion_tokens"] for chunk in fake.stream_chat(stream_options=options)
    ]
    assert counts == sorted(counts)
    assert counts[0] == 1 < counts[-1]


@pytest.mark.parametrize("include_usage", [False, True])
def test_the_cache_report_is_there_when_asked_for(fake: RunningServer, include_usage: bool) -> None:
    report = fake.chat(cache_report=True).json()["cache_report"]
    assert report["reason"] == "cold"
    chunks = fake.stream_chat(cache_report=True, stream_options={"include_usage": include_usage})
    assert chunks[-1]["cache_report"] == report
    assert not any("cache_report" in chunk for chunk in chunks[:-1])


def test_several_choices_stay_apart(fake: RunningServer) -> None:
    body = fake.chat(n=3).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {"Hello, world!"}
    chunks = fake.stream_chat(n=3)
    assert [joined(chunks, index) for index in range(3)] == ["Hello, world!"] * 3
    finishes = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert finishes.count("stop") == 3


def test_logprobs_in_the_form_of_openai(fake: RunningServer) -> None:
    body = fake.chat(logprobs=True, top_logprobs=2).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "Hello, world!"
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] == -0.5
        assert [rival["logprob"] for rival in entry["top_logprobs"]] == [-0.5, -1.0]
    assert body["choices"][0]["logprobs"]["refusal"] is None
    streamed = [
        entry
        for chunk in fake.stream_chat(logprobs=True, top_logprobs=2)
        for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])
    ]
    assert streamed == content


def test_logprobs_without_rivals(fake: RunningServer) -> None:
    content = fake.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in content)


def test_token_ids_when_asked_for(fake: RunningServer) -> None:
    tokenizer = fake.engine.preprocessor.tokenizer
    body = fake.chat(return_token_ids=True).json()
    assert tokenizer.decode(body["choices"][0]["token_ids"]) == "Hello, world!"
    assert tokenizer.decode(body["prompt_token_ids"]).startswith("user: hi")
    chunks = fake.stream_chat(return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert ids == body["choices"][0]["token_ids"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_limit_ends_the_answer(fake: RunningServer, field: str) -> None:
    body = fake.post("/v1/chat/completions", chat_body() | {field: 2}).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2


def test_the_newer_limit_wins(fake: RunningServer) -> None:
    body = fake.chat(max_tokens=1, max_completion_tokens=3).json()
    assert body["usage"]["completion_tokens"] == 3


def test_null_means_not_given(fake: RunningServer) -> None:
    names = ["model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "n", "stop"]
    names += ["seed", "tools", "tool_choice", "logprobs", "top_logprobs", "response_format"]
    names += ["logit_bias", "chat_template_kwargs", "cache_salt"]
    body = chat_body() | dict.fromkeys(names)
    assert fake.post("/v1/chat/completions", body).status_code == 200


def test_options_of_the_prompt_reach_the_preprocessor(fake: RunningServer) -> None:
    fake.chat(chat_template_kwargs={"enable_thinking": False}, cache_salt="tenant-1")
    call = fake.engine.preprocessor.calls[-1]
    assert call["chat_template_kwargs"] == {"enable_thinking": False}
    assert call["cache_salt"] == "tenant-1"
    assert call["add_generation_prompt"] is True
    assert call["continue_final_message"] is False
    assert call["tools"] is None
    fake.chat(continue_final_message=True)
    call = fake.engine.preprocessor.calls[-1]
    assert call["continue_final_message"] is True
    assert call["add_generation_prompt"] is False
    fake.chat(reasoning_effort="none")
    assert fake.engine.preprocessor.calls[-1]["chat_template_kwargs"] == {"enable_thinking": False}


def test_verbosity_is_for_templates_that_know_it(fake: RunningServer) -> None:
    response = fake.chat(verbosity="low")
    assert response.headers["x-vlm-serve-ignored-fields"] == "verbosity"
    response = fake.post("/v1/responses", {"input": "x", "text": {"verbosity": "high"}})
    assert response.headers["x-vlm-serve-ignored-fields"] == "text.verbosity"
    assert response.json()["text"]["verbosity"] == "high"
    assert "x-vlm-serve-ignored-fields" not in fake.chat(verbosity="medium").headers
    preprocessor = fake.engine.preprocessor
    preprocessor.template_traits = TemplateTraits(frozenset({"verbosity"}))
    response = fake.chat(verbosity="low")
    assert "x-vlm-serve-ignored-fields" not in response.headers
    assert fake.engine.preprocessor.calls[-1]["chat_template_kwargs"] == {"verbosity": "low"}
    odds: tuple[Any, ...] = ("none", 5, [])
    for odd in odds:
        assert fake.chat(verbosity=odd).status_code == 400
        body = {"input": "x", "text": {"verbosity": odd}}
        assert fake.post("/v1/responses", body).status_code == 400


def test_messages_reach_the_preprocessor_with_all_that_templates_may_want(
    fake: RunningServer,
) -> None:
    call = {"id": "1", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    assert fake.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    *_, answer, tool = came = fake.engine.preprocessor.calls[-1]["messages"]
    assert came[:2] == messages[:2]
    assert answer["tool_calls"] == [
        {"id": "1", "function": {"name": "look", "arguments": {"at": 1}}}
    ]
    assert tool == messages[3]


def test_ignored_fields_are_named(fake: RunningServer) -> None:
    fields = {"user": "ann", "metadata": {"a": "b"}, "nonsense": 1, "bad\r\nname": 1}
    response = fake.post("/v1/chat/completions", chat_body() | fields)
    assert response.status_code == 200
    named = response.headers["x-vlm-serve-ignored-fields"].split(", ")
    assert named == ["user", "metadata", "nonsense", "..."]
    response = fake.post("/v1/chat/completions", chat_body() | {"temprature": 0, "max_token": 5})
    meant = "temprature (temperature?), max_token (max_tokens?)"
    assert response.headers["x-vlm-serve-ignored-fields"] == meant


def test_a_clients_request_id_is_kept(fake: RunningServer) -> None:
    assert fake.chat(request_id="mine-1").json()["id"] == "chatcmpl-mine-1"
    response = fake.post("/v1/chat/completions", chat_body(), headers={"X-Request-Id": "mine-2"})
    assert response.json()["id"] == "chatcmpl-mine-2"
    assert response.headers["x-request-id"] == "mine-2"
    response = fake.post("/v1/chat/completions", chat_body(), headers={"X-Request-Id": "no good"})
    assert response.headers["x-request-id"] != "no good"


def test_a_prediction_reaches_the_engine(fake: RunningServer) -> None:
    for content in ("Hello, world!", [{"type": "text", "text": "Hello,"}, {"text": " world!"}]):
        response = fake.chat(prediction={"type": "content", "content": content})
        assert response.status_code == 200
        assert "x-vlm-serve-ignored-fields" not in response.headers
        assert fake.engine.latest_params.prediction == "Hello, world!"
        assert response.json()["usage"]["completion_tokens_details"] == {
            "accepted_prediction_tokens": 4,
            "rejected_prediction_tokens": 1,
        }


@pytest.mark.parametrize("prediction", ["Hello", {"content": 3}, {"content": "x" * 65537}])
def test_a_prediction_that_is_none_is_refused(fake: RunningServer, prediction: Any) -> None:
    response = fake.chat(prediction=prediction)
    assert response.status_code == 400
    assert "prediction" in response.text
