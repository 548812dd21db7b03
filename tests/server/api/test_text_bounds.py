"""Lengths of texts in enforced calls, over HTTP: the same request again and again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import RunningServer, chat_body, running

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

CONFIG = EngineConfig(device="cpu", cache_memory="48MiB", max_model_len=1024, max_num_seqs=4)
BOUNDS = [(0, 64), (0, 100), (0, 1000), (80, None), (20, 24)]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(Engine.from_checkpoint("demo", CONFIG), ServerConfig(port=0)) as server:
        yield server


def parameters(least: int, most: int | None) -> dict[str, Any]:
    text = {"type": "string", "minLength": least, **({"maxLength": most} if most else {})}
    return {"type": "object", "properties": {"text": text}, "required": ["text"]}


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_a_forced_call_keeps_the_lengths_of_its_texts(
    server: RunningServer, bounds: tuple[int, int | None]
) -> None:
    least, most = bounds
    function = {"name": "note", "parameters": parameters(least, most)}
    for number, temperature in enumerate((0.0, 1.0, 3.0)):
        body = chat_body(
            f"write note {number}",
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
            max_tokens=450,
            temperature=temperature,
            seed=number,
        )
        response = server.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        if choice["finish_reason"] == "length":
            continue
        for call in choice["message"]["tool_calls"]:
            size = len(json.loads(call["function"]["arguments"])["text"])
            assert least <= size <= (most or 450 * 16)


def test_any_tool_of_messages_with_a_length(server: RunningServer) -> None:
    tool = {"name": "note", "input_schema": parameters(0, 300)}
    body = chat_body("write", tools=[tool], tool_choice={"type": "any"}, max_tokens=450)
    response = server.post("/v1/messages", body)
    assert response.status_code == 200, response.text
    assert response.json()["stop_reason"] in ("tool_use", "max_tokens")
