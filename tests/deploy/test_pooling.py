"""`vlm-serve deploy --task embed` answers as one process does."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from families import SPECS
from make_checkpoint import make_checkpoint
from process_tree import processes_below, runs
from server_process import ServerProcess, server_process

pytestmark = pytest.mark.ray

OPTIONS = (
    *("--task", "embed", "--device", "cpu", "--dtype", "float32"),
    *("--cache-memory", "32MiB", "--max-model-len", "2048", "--threads", "1"),
)
BODY = {"input": ["a red circle", "a blue square"], "instruction": "Find shapes"}
SECONDS = 120.0


def asked(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    with httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as client:
        return client.post(path, json=body)


def test_vectors_are_those_of_one_process(tmp_path: Path) -> None:
    path = str(make_checkpoint(tmp_path / "model", SPECS["vl"]))
    with (
        server_process(path, *OPTIONS, "--silence-timeout", "60", command="deploy") as several,
        server_process(path, *OPTIONS) as alone,
    ):
        found, expected = (asked(each.url, "/v1/embeddings", BODY) for each in (several, alone))
        assert found.status_code == expected.status_code == 200, found.text
        assert found.json()["data"] == expected.json()["data"]
        for place, body, complaint in (
            ("/v1/rerank", {"query": "a", "documents": ["b"]}, "with --task rerank"),
            ("/v1/completions", {"prompt": "a"}, "generates no answers"),
        ):
            refused = asked(several.url, place, body)
            assert refused.status_code == 400 and complaint in refused.text
        everything_ends_with_a_killed_gateway(several)


def everything_ends_with_a_killed_gateway(server: ServerProcess) -> None:
    """Replicas and Ray's agents included, even those that are stopped, and within seconds."""
    below = processes_below(server.process.pid)
    stopped = [pid for pid, line in below.items() if "Agent" in line or "ServeReplica" in line]
    assert len(stopped) == 4
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    server.process.kill()
    server.process.wait()
    deadline = time.monotonic() + 10
    while left := [line for pid, line in below.items() if runs(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
