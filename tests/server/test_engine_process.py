"""`serve` with its engine in a process of its own, as a user runs it: signals, deaths, errors."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hostile_files import data_url, image_of
from process_tree import processes_below, runs
from server_process import COMMAND, ServerProcess, server_process
from serving import wait_for

pytestmark = pytest.mark.processes
SMALL = ["--device", "cpu", "--cache-memory", "32MiB", "--max-model-len", "2048", "--threads", "1"]
APART = [*SMALL, "--engine-process", "on", "--speculative", "off", "--block-size", "16"]
SECONDS = 60
CHAT = "/v1/chat/completions"
WORKER = "vlm_serve.engine.remote.worker"
ENDLESS = {"stream": True, "ignore_eos": True, "max_tokens": 1900}
PICTURE = {
    "type": "image_url",
    "image_url": {"url": data_url("image/png", image_of("PNG", 400, 400))},
}


def shared_memory() -> set[str]:
    """What lies in shared memory of servers; other tests' ranks have theirs."""
    return {name for name in os.listdir("/dev/shm") if "ranks" not in name}


@contextmanager
def serving_apart(checkpoint: Path, log: Path, *more: str) -> Iterator[ServerProcess]:
    with (
        log.open("w") as file,
        server_process(str(checkpoint), *APART, *more, log=file) as server,
    ):
        yield server


def worker_of(server: ServerProcess) -> int:
    """The process of the engine."""
    (pid,) = (pid for pid, line in processes_below(server.process.pid).items() if WORKER in line)
    return pid


def client_of(server: ServerProcess) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False)


def chat(text: str = "hi", *parts: Any, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": text}, *parts]
    return {"messages": [{"role": "user", "content": content}], **fields}


@contextmanager
def streams(client: httpx.Client, count: int) -> Iterator[list[Iterator[str]]]:
    """Endless streams, each of which has begun."""
    opened: list[Any] = []
    try:
        for number in range(count):
            body = chat(f"hi {number}", **ENDLESS)
            opened.append(client.stream("POST", "/v1/chat/completions", json=body))
        lines = [each.__enter__().iter_lines() for each in opened]
        for each in lines:
            assert next(each).startswith("data: ")
        yield lines
    finally:
        for each in opened:
            each.__exit__(None, None, None)


def test_it_answers_and_ends_in_order(checkpoint: Path, tmp_path: Path) -> None:
    before = shared_memory()
    with serving_apart(checkpoint, tmp_path / "log") as server, client_of(server) as client:
        assert re.search(r"engine +in a process of its own", server.table)
        body = chat("Look.", PICTURE, max_tokens=4, temperature=0, cache_report=True)
        first, again = (client.post("/v1/chat/completions", json=body).json() for _ in range(2))
        assert first["choices"] == again["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        below = processes_below(server.process.pid)
        assert any("decode_worker" in line for line in below.values())
        with streams(client, 2) as lines:
            assert client.get("/load").json()["num_requests_running"] == 2
            assert "vlm_serve_step_host_seconds" in client.get("/metrics").text
            worker = worker_of(server)
            # As a terminal, or a service manager that ends a whole group.
            os.kill(worker, signal.SIGINT)
            os.kill(worker, signal.SIGTERM)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: client.get("/ready").status_code == 503)
            assert any('"length"' in line for line in lines[0]), "open requests may end"
            assert any('"length"' in line for line in lines[1])
        assert server.process.wait(SECONDS) == 0
        wait_for(lambda: not any(map(runs, below)))
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert shared_memory() == before


def test_named_pictures_are_those_that_were_sent(checkpoint: Path, tmp_path: Path) -> None:
    """The engine asks for pixels here, also after it has forgotten all of them."""
    with serving_apart(checkpoint, tmp_path / "log") as server, client_of(server) as client:
        options = {"max_tokens": 4, "temperature": 0, "cache_report": True}
        sent = client.post(CHAT, json=chat("Look.", PICTURE | {"uuid": "p"}, **options)).json()
        digest = sent["cache_report"]["media"][0]["item_hash"]
        for named in ({"image_url": None, "uuid": "p"}, {"image_url": f"hash:{digest}"}):
            body = chat("Look.", {"type": "image_url", **named}, **options)
            again = client.post(CHAT, json=body).json()
            assert again["choices"] == sent["choices"]
            cold = client.post(CHAT, json=body | {"cache_salt": "x"})
            assert cold.status_code == 409 and cold.json()["error"]["code"] == "media_not_held"


def test_when_the_engine_is_killed_streams_end_with_its_error_and_so_does_the_server(
    checkpoint: Path, tmp_path: Path
) -> None:
    before = shared_memory()
    with serving_apart(checkpoint, tmp_path / "log") as server, client_of(server) as client:
        below = processes_below(server.process.pid)
        with streams(client, 3) as lines:
            os.kill(worker_of(server), signal.SIGKILL)
            for each in lines:
                told = [line for line in each if line]
                assert any("engine_stopped" in line and "SIGKILL" in line for line in told[-2:])
        assert server.process.wait(SECONDS) == 1
        wait_for(lambda: not any(map(runs, below)))
    log = (tmp_path / "log").read_text()
    assert "the engine ends: the engine's process was ended by SIGKILL" in log
    assert "Traceback" not in log
    assert shared_memory() == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_dies_leaves_nothing_behind(
    checkpoint: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """A second SIGTERM ends it at once, too."""
    before = shared_memory()
    with serving_apart(checkpoint, tmp_path / "log") as server, client_of(server) as client:
        body = chat("Look.", PICTURE, max_tokens=1)
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        with streams(client, 2):
            below = processes_below(server.process.pid)
            assert any("grammar.worker" in line for line in below.values())
            server.process.send_signal(number)
            if number == signal.SIGTERM:
                wait_for(lambda: client.get("/ready").status_code == 503)
                server.process.send_signal(number)
            server.process.wait(SECONDS)
            wait_for(lambda: not any(map(runs, below)))
    assert shared_memory() == before


@pytest.mark.parametrize(
    "wrong",
    [
        ["no-such-folder/at-all"],
        ["demo", "--cache-memory", "1KiB"],
        ["demo", "--max-model-len", "1000000000"],
    ],
)
def test_a_start_that_fails_says_the_same_in_both_forms(wrong: list[str]) -> None:
    def tried(form: str) -> tuple[int, str]:
        line = [*COMMAND, "serve", *wrong, "--device", "cpu", "--port", "0", "--engine-process"]
        ended = subprocess.run([*line, form], capture_output=True, text=True, timeout=120)
        return ended.returncode, ended.stderr.strip().splitlines()[-1]

    apart = tried("on")
    assert apart == tried("off")
    assert apart[0] in (1, 2)
