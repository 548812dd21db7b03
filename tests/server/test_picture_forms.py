"""A picture in every API's form, on a real engine: one question, one answer, one cache."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import RunningServer, running, wait_for

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

FILE = Path(__file__).parents[2] / "examples" / "media" / "shapes.png"
DATA = base64.b64encode(FILE.read_bytes()).decode()
URL = f"data:image/png;base64,{DATA}"
QUESTION, ANSWER = "What color is the star?", "The star is red."
COMMON: dict[str, Any] = {"temperature": 0, "cache_report": True}


def chat(server: RunningServer) -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "text", "text": QUESTION},
    ]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 16}
    return ok(server, "/v1/chat/completions", body)


def responses(server: RunningServer) -> dict[str, Any]:
    content = [
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 16}
    return ok(server, "/v1/responses", body)


def messages(server: RunningServer) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 16}
    return ok(server, "/v1/messages", body)


def ok(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(path, body | COMMON)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture(scope="module")
def _server() -> Iterator[RunningServer]:
    config = EngineConfig(device="cpu", cache_memory="48MiB", max_model_len=1024, threads=1)
    with running(Engine.from_checkpoint("demo", config), ServerConfig(port=0)) as server:
        yield server


@pytest.fixture
def server(_server: RunningServer) -> Iterator[RunningServer]:
    _server.engine.flush()
    yield _server
    wait_for(lambda: _server.service.requests.num_open == 0)
    _server.engine.check()


def test_a_response_sees_what_chat_sees(server: RunningServer) -> None:
    body = responses(server)
    (item,) = body["output"]
    assert item["content"][0]["text"] == ANSWER
    assert body["usage"]["input_tokens_details"]["image_tokens"] > 0
    assert_one_cache(body["cache_report"], chat(server))


def test_a_message_sees_what_chat_sees(server: RunningServer) -> None:
    body = messages(server)
    assert [block["text"] for block in body["content"]] == [ANSWER]
    assert body["usage"]["cache_read_input_tokens"] == 0
    assert_one_cache(body["cache_report"], chat(server))
    again = messages(server)
    assert again["content"] == body["content"]
    assert again["usage"]["cache_read_input_tokens"] == again["cache_report"]["boundary"] > 0


def assert_one_cache(cold: dict[str, Any], then: dict[str, Any]) -> None:
    """What another form has computed is there for chat, and chat answers the same."""
    assert (cold["media_decoded"], cold["media_encoded"], cold["boundary"]) == (1, 1, 0)
    assert then["choices"][0]["message"]["content"] == ANSWER
    warm = then["cache_report"]
    assert (warm["media_encoded"], warm["media_skipped"], warm["reason"]) == (0, 1, "full")
    assert warm["prompt_tokens"] == cold["prompt_tokens"]
