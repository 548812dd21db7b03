"""`make deploy`: replicas of the demo model with a store that they share, from start to end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from ports import free_port
from process_tree import processes_below, runs
from serving import wait_for

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SECONDS = 300.0
SMALL = "--device cpu --cache-memory 32MiB --max-model-len 2048 --threads 1 --shutdown-timeout 1"


@pytest.mark.ray
@pytest.mark.skipif(
    not (shutil.which("make") and shutil.which("redis-server") and (BIN / "vlm-serve").exists()),
    reason="needs make, redis-server and an installed vlm-serve",
)
def test_replicas_share_a_store_that_ends_with_them() -> None:
    port, store = free_port(), free_port()
    # What is installed here is used: make's own .venv is not set up for this.
    given = {"BIN": BIN, "PORT": port, "STORE_PORT": store, "ARGS": SMALL}
    words = [f"{name}={value}" for name, value in given.items()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        ["make", "--old-file", ".venv/installed-ray", "deploy", *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    below: dict[int, str] = {}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:

            def ready() -> bool:
                assert process.poll() is None, "it ended early"
                with contextlib.suppress(httpx.TransportError):
                    return client.get("/ready", timeout=SECONDS).status_code == 200
                return False

            wait_for(ready, SECONDS)
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            answer = client.post("/v1/chat/completions", json=body, timeout=SECONDS)
            assert answer.status_code == 200, answer.text
            metrics = client.get("/metrics", timeout=SECONDS).text
        assert "vlm_serve:replicas 2.0" in metrics
        assert "vlm_serve:shared_store_events_total" in metrics
        below = processes_below(process.pid)
        assert any(line.startswith("redis-server") for line in below.values())
        process.send_signal(signal.SIGTERM)
        process.wait(SECONDS)
        deadline = time.monotonic() + SECONDS
        while left := [line for pid, line in below.items() if runs(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        for pid in (process.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
