"""Tool calls and reasoning as clients see them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import FakeEngine
from pydantic_core import from_json
from serving import RunningServer, running
from tool_texts import CALL
from tool_texts import CITY_TOOL as TOOL

from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig


def streamed_calls(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts the pieces together as clients do."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for entry in chunk["choices"][0]["delta"].get("tool_calls", []):
            if entry["index"] == len(calls):
                assert entry["type"] == "function"
                assert entry["id"].startswith("call_")
                calls.append({"id": entry["id"], "name": entry["function"]["name"], "text": ""})
            else:
                assert "id" not in entry
                assert "name" not in entry["function"]
            calls[entry["index"]]["text"] += entry["function"]["arguments"]
    return calls


def test_a_tool_call_in_a_whole_answer(fake: RunningServer) -> None:
    fake.engine.answer = CALL
    choice = fake.chat(tools=[TOOL], tool_choice="auto").json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris", "days": 3}
    assert fake.engine.preprocessor.calls[-1]["tools"] == [TOOL]


def test_a_tool_call_in_a_stream(fake: RunningServer) -> None:
    fake.engine.answer = CALL + "\n" + CALL[CALL.index("<tool_call>") :]
    chunks = fake.stream_chat(tools=[TOOL])
    first, second = streamed_calls(chunks)
    assert first["id"] != second["id"]
    for call in (first, second):
        assert call["name"] == "get_weather"
        assert json.loads(call["text"]) == {"city": "Paris", "days": 3}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert text == "Let me look."


def test_only_calls_means_no_content(fake: RunningServer) -> None:
    fake.engine.answer = CALL[CALL.index("<tool_call>") :]
    message = fake.chat(tools=[TOOL]).json()["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}])
def test_without_tools_the_text_stays_as_it_is(fake: RunningServer, fields: dict[str, Any]) -> None:
    fake.engine.answer = CALL
    choice = fake.chat(**fields).json()["choices"][0]
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"


def test_a_call_that_the_limit_cuts_is_sent_unfinished(fake: RunningServer) -> None:
    fake.engine.answer = CALL
    tokenizer = fake.engine.preprocessor.tokenizer
    tokens = tokenizer.encode_plain(CALL)
    seen = set()
    for limit in range(1, len(tokens)):
        written = tokenizer.decode(tokens[:limit])
        choice = fake.chat(tools=[TOOL], max_tokens=limit).json()["choices"][0]
        chunks = fake.stream_chat(tools=[TOOL], max_tokens=limit)
        assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"
        message = choice["message"]
        streamed = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        assert streamed == (message["content"] or "")
        assert "<" not in streamed
        calls = message.get("tool_calls") or []
        assert [call["text"] for call in streamed_calls(chunks)] == [
            call["function"]["arguments"] for call in calls
        ]
        assert len(calls) == ("<function=get_weather>" in written)
        for call in calls:
            arguments = call["function"]["arguments"]
            seen.add(arguments)
            assert "{" in arguments
            if "</function>" in written:
                assert json.loads(arguments) == {"city": "Paris", "days": 3}
            else:
                with pytest.raises(json.JSONDecodeError):
                    json.loads(arguments)
                assert from_json(arguments, allow_partial=True).keys() <= {"city", "days"}
    assert '{"city": "Paris", "days": 3' in seen


@pytest.mark.parametrize(
    ("prompt_end", "answer"),
    [
        ("assistant:<think>\n", "I see\n</think>\n\nRed."),
        ("assistant:", "<think>I see</think>Red."),
    ],
)
def test_reasoning_is_split_off_when_the_operator_wants_it(
    tokenizer: Tokenizer, prompt_end: str, answer: str
) -> None:
    engine = FakeEngine(tokenizer)
    engine.answer = answer
    engine.preprocessor.generation_prompt = prompt_end
    with running(engine, ServerConfig(port=0, reasoning_parser="qwen3")) as server:
        message = server.chat().json()["choices"][0]["message"]
        assert message["content"] == "Red."
        assert message["reasoning"] == message["reasoning_content"] == "I see"
        deltas = [chunk["choices"][0]["delta"] for chunk in server.stream_chat()]
        assert "".join(delta.get("reasoning") or "" for delta in deltas) == "I see"
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "I see"
        assert "".join(delta.get("content") or "" for delta in deltas) == "Red."


def test_reasoning_stays_in_the_text_by_default(fake: RunningServer) -> None:
    fake.engine.answer = "<think>I see</think>Red."
    message = fake.chat().json()["choices"][0]["message"]
    assert message["content"] == "<think>I see</think>Red."
    assert "reasoning" not in message


def test_tool_calls_can_be_left_alone(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    engine.answer = CALL
    with running(engine, ServerConfig(port=0, tool_call_parser="none")) as server:
        assert server.chat(tools=[TOOL]).json()["choices"][0]["message"]["content"] == CALL
