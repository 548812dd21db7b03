"""`return_progress`: streams tell how much of a prompt has been processed, as llama.cpp does.

What has not been read is told no more once there is newer, so nothing here counts what came.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from serving import RunningServer, ok, running

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.remote.engine import RemoteEngine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

CONFIG = EngineConfig(
    dtype="float32",
    block_size=16,
    cache_memory="32MiB",
    max_model_len=2048,
    max_num_batched_tokens=128,
    step_time_target=0.0,
    speculative="off",
)
LONG = "Where does the small red house stand? " * 30
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module", params=["here", pytest.param("apart", marks=pytest.mark.processes)])
def server(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[RunningServer]:
    apart = request.param == "apart"
    make: Any = RemoteEngine if apart else Engine.from_checkpoint
    options = ServerConfig(port=0, idle_check=False)
    with running(make(str(checkpoint), CONFIG), options) as server:
        yield server


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": LONG}]
    return {"messages": messages, "max_tokens": 3, "temperature": 0, **fields}


def progress_of(chunks: list[dict[str, Any]]) -> list[dict[str, int]]:
    return [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]


def said(chunks: list[dict[str, Any]]) -> str:
    """The text of an answer, thoughts included."""
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("reasoning", "") + delta.get("content", "") for delta in deltas)


def test_a_chat_tells_each_step_of_its_prompt_before_the_answer(server: RunningServer) -> None:
    server.engine.flush()
    asked = chat(return_progress=True, stream_options={"include_usage": True})
    chunks = server.stream(CHAT, asked | {"return_token_ids": True})
    told, usage = progress_of(chunks), chunks[-1]["usage"]
    total = usage["prompt_tokens"]
    processed = [each["processed"] for each in told]
    assert processed == sorted(set(processed)) and processed[-1] == total
    assert all(each["total"] == total and each["cache"] == 0 for each in told)
    times = [each["time_ms"] for each in told]
    assert times == sorted(times) and all(isinstance(each, int) for each in times)
    for chunk in chunks[: len(told)]:
        assert chunk["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]
        assert chunk["usage"] is None and chunk["object"] == "chat.completion.chunk"
    assert "prompt_token_ids" in chunks[len(told)], "the answer's first chunk is as ever"
    again = server.stream(CHAT, asked)
    (last,) = progress_of(again)
    assert 0 < last["cache"] < last["processed"] == total
    plain = server.stream(CHAT, asked | {"return_progress": False})
    assert said(again) == said(plain) == said(chunks) != "" and not progress_of(plain)


def test_each_prompt_of_completions_has_its_own(server: RunningServer) -> None:
    server.engine.flush()
    prompts = ["The red house. " * 60, "A blue star. " * 60]
    asked = {"prompt": prompts, "max_tokens": 2, "n": 2, "return_progress": True, "temperature": 1}
    told: dict[int, list[int]] = {}
    for chunk in server.stream(COMPLETIONS, asked):
        if "prompt_progress" in chunk:
            (choice,) = chunk["choices"]
            assert choice == {"index": choice["index"], "text": "", "finish_reason": None}
            told.setdefault(choice["index"], []).append(chunk["prompt_progress"]["processed"])
    assert told.keys() == {0, 2}
    assert all(each == sorted(set(each)) for each in told.values())


def test_a_whole_answer_has_none_and_the_field_is_taken(server: RunningServer) -> None:
    for path, body in ((CHAT, chat()), (COMPLETIONS, {"prompt": "The", "max_tokens": 1})):
        response = server.post(path, body | {"return_progress": True})
        assert "prompt_progress" not in ok(response)
        assert "x-vlm-serve-ignored-fields" not in response.headers


def test_other_apis_name_it_as_ignored(server: RunningServer) -> None:
    said = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    for path, body in (("/v1/messages", said), ("/v1/responses", {"input": "Hi"})):
        response = server.post(path, body | {"return_progress": True})
        assert response.status_code == 200, response.text
        assert response.headers["x-vlm-serve-ignored-fields"] == "return_progress"


def test_openais_client_reads_the_answer_behind_it(server: RunningServer) -> None:
    server.engine.flush()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    asked = cast("Any", chat(model="test-model"))
    with client.chat.completions.stream(**asked, extra_body={"return_progress": True}) as stream:
        told = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.current_completion_snapshot
    assert any("prompt_progress" in (each.model_extra or {}) for each in told)
    whole = client.chat.completions.create(**asked).choices[0].message
    made = final.choices[0].message
    assert made.role == "assistant"
    for name in ("content", "reasoning"):
        assert (getattr(made, name, None) or "") == (getattr(whole, name, None) or "")
