"""Streams whose clients are slow to read, over HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import RunningServer, running, wait_for

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.answers.unread import UnreadDeltas
from vlm_serve.server.config import ServerConfig


def test_a_queue_tells_of_the_limit_once_and_of_its_half() -> None:
    told: list[bool] = []
    queue = UnreadDeltas(4)
    queue.on_change = told.append
    for _ in range(6):
        queue.put_nowait(Delta(0))
    assert told == [True]
    for _ in range(3):
        queue.get_nowait()
    assert told == [True]
    queue.get_nowait()
    assert told == [True, False]


@pytest.fixture
def server(checkpoint: Path) -> Iterator[RunningServer]:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=16,
        cache_memory="32MiB",
        max_model_len=2048,
        max_num_seqs=1,
        threads=1,
        speculative="off",
    )
    engine = Engine.from_checkpoint(str(checkpoint), config)
    with running(engine, ServerConfig(port=0, idle_check=False)) as server:
        yield server
    engine.close()


@pytest.mark.sweep
def test_a_stream_that_nobody_reads_gives_up_its_seat(server: RunningServer) -> None:
    """There is one seat; the other request has the same tenant."""
    fields: dict[str, Any] = {"max_tokens": 1000, "ignore_eos": True, "seed": 1}
    fields |= {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    body = json.dumps(fields | {"stream": True, "top_logprobs": 20}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        wait_for(lambda: server.engine.stats()["num_unread"] == 1)
        wait_for(lambda: server.engine.num_running == 0)
        assert server.chat(max_tokens=4).status_code == 200
        assert server.engine.stats()["num_unread"] == 1
        client.settimeout(60)
        read = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert b"data: [DONE]" in read
    assert read.count(b'"logprob":') == 1000 * 21
    whole = server.post("/v1/chat/completions", fields).json()["choices"][0]
    events = [
        json.loads(line.removeprefix(b"data: "))
        for line in read.split(b"\n")
        if line.startswith(b"data: {")
    ]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (
            whole["message"].get(name) or ""
        )
    assert server.engine.stats()["num_unread"] == 0
