"""Replicas of several ranks each, whose number grows while prompts wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from process_tree import processes_below, replica_pids
from server_process import ServerProcess, server_process
from serving import wait_for

from vlm_serve.deploy.options import DeployConfig
from vlm_serve.deploy.replica import ReplicaSetup
from vlm_serve.deploy.serving import application
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

pytestmark = pytest.mark.ray

SECONDS = 300.0
RANKS = 2
OPTIONS = ("--device", "cpu", "--cache-memory", "32MiB", "--max-model-len", "2048")
SCALED = ("--replicas", "1", "--max-replicas", "2", "--target-queued-tokens", "200")
PATIENCE = ("--threads", "1", "--shutdown-timeout", "1", "--silence-timeout", "60")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    ranks = ("--tensor-parallel-size", str(RANKS))
    with server_process("demo", *OPTIONS, *PATIENCE, *SCALED, *ranks, command="deploy") as running:
        yield running


def question(number: int) -> dict[str, Any]:
    text = f"{number} is a number, and this is a text about it. " * 20
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def test_another_group_of_ranks_comes_while_prompts_wait(server: ServerProcess) -> None:
    assert len(replica_pids(server.process.pid)) == 1
    enough = threading.Event()

    def ask(first: int) -> None:
        """One request after the other."""
        with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as own:
            for number in range(first, 10**9, 8):
                if enough.is_set():
                    return
                answer = own.post("/v1/chat/completions", json=question(number))
                assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, number) for number in range(8)]
        try:
            wait_for(lambda: _answering(server) == 2, SECONDS)
        finally:
            enough.set()
        for each in asking:
            each.result(SECONDS)
    below = processes_below(server.process.pid)
    ranks = [line for line in below.values() if "vlm_serve.engine.steps.ranks" in line]
    assert len(ranks) == 2 * (RANKS - 1), below


def _answering(server: ServerProcess) -> int:
    with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as client:
        return len(client.get("/v1/cache/stats").json().get("data", ()))


def test_a_group_of_ranks_is_placed_on_one_machine() -> None:
    def made(**options: Any) -> Any:
        setup = ReplicaSetup("demo", EngineConfig(**options), ServerConfig(), ("demo",), 0)
        return application(setup, DeployConfig())._bound_deployment

    group = made(tensor_parallel_size=RANKS, device="cpu")._replica_config
    assert group.placement_group_bundles == [{"CPU": 2.0}]
    assert group.placement_group_strategy == "STRICT_PACK"
    alone = made(device="cpu")._replica_config
    assert alone.placement_group_bundles is None
