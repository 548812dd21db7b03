"""Replicas whose engines end although their processes live: a rank of theirs is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from process_tree import processes_below
from server_process import ServerProcess, server_process
from serving import wait_for

pytestmark = pytest.mark.ray

SECONDS = 300.0
OPTIONS = (
    "--device",
    "cpu",
    "--cache-memory",
    "32MiB",
    "--max-model-len",
    "2048",
    "--threads",
    "1",
)
RANKS = ("--replicas", "2", "--tensor-parallel-size", "2")
PATIENCE = ("--shutdown-timeout", "1", "--silence-timeout", "60")
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process("demo", *OPTIONS, *RANKS, *PATIENCE, command="deploy") as running:
        yield running


def question(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{number} is a number. Say more about it."}]
    return {"messages": messages, "max_tokens": 300, "ignore_eos": True, "temperature": 0}


def rank_pids(server: ServerProcess) -> list[int]:
    below = processes_below(server.process.pid)
    return [pid for pid, line in below.items() if "vlm_serve.engine.steps.ranks" in line]


def test_answers_go_on_elsewhere_when_a_rank_is_killed(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as client:
        wait_for(lambda: len(rank_pids(server)) == 2, SECONDS)

        def whole(number: int) -> str:
            answer = client.post(CHAT, json=question(number))
            assert answer.status_code == 200, answer.text
            said: str = answer.json()["choices"][0]["message"]["content"]
            return said

        def streamed(number: int) -> str:
            """Kill a rank of one replica once the first stream has begun."""
            said, body = "", question(number) | {"stream": True}
            with client.stream("POST", CHAT, json=body) as answer:
                for line in answer.iter_lines():
                    if number == 0 and said and not killed:
                        killed.append(rank_pids(server)[0])
                        os.kill(killed[0], signal.SIGKILL)
                    if line.startswith("data: {"):
                        chunk = json.loads(line[6:])
                        assert "error" not in chunk, chunk
                        said += chunk["choices"][0]["delta"].get("content") or ""
            return said

        right, killed = [whole(number) for number in range(6)], list[int]()
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(streamed, range(6))) == right
        assert killed
        assert [whole(number) for number in range(6)] == right, "asked of an ended engine, perhaps"
        moved = client.get("/metrics").text.split("\nvlm_serve:failovers_total ")[1].split()[0]
        assert float(moved) >= 1
        wait_for(lambda: len(set(rank_pids(server)) - set(killed)) == 2, SECONDS)
        assert [whole(number) for number in range(6)] == right
