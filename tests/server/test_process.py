"""The commands as a user runs them: processes of their own, signals included."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import re
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from process_tree import children_of, runs
from server_process import COMMAND, server_process
from serving import wait_for

from vlm_serve.system.collector import COLLECTIONS_BEFORE_A_FULL_ONE

SMALL = ["--device", "cpu", "--cache-memory", "32MiB", "--max-model-len", "2048", "--threads", "1"]
SECONDS = 60


def runs_grammar_worker(process: int) -> bool:
    return any("vlm_serve.grammar.worker" in line for line in children_of(process).values())


def test_serve_answers_and_ends_on_a_signal(checkpoint: Path) -> None:
    environment = {"VLM_SERVE_BLOCK_SIZE": "16", "VLM_SERVE_SERVED_MODEL_NAME": "mine"}
    with server_process(str(checkpoint), *SMALL, environment=environment) as server:
        assert re.search(r"granularity +16 tokens", server.table)
        process = server.process
        with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "mine"
            messages = [{"role": "user", "content": "hi"}]
            body = {"messages": messages, "max_tokens": 4, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] <= 4
            wait_for(lambda: runs_grammar_worker(process.pid))
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0


@pytest.mark.processes
def test_what_stays_is_out_of_the_collectors_sight(checkpoint: Path, tmp_path: Path) -> None:
    """Else looking through it stops all threads for 0.2 s now and then; and looking through what
    has come since is not done often either."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, gc, os, pathlib\n"
        f"file = pathlib.Path({str(tmp_path)!r}, f'frozen.{{os.getpid()}}')\n"
        "numbers = lambda: f'{gc.get_freeze_count()} {gc.get_threshold()[2]}'\n"
        "atexit.register(lambda: file.write_text(numbers()))\n"
    )
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths)}
    with server_process(str(checkpoint), *SMALL, environment=environment) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SECONDS) == 0
        frozen, threshold = (tmp_path / f"frozen.{server.process.pid}").read_text().split()
    assert int(frozen) > 100_000
    assert int(threshold) == COLLECTIONS_BEFORE_A_FULL_ONE > gc.get_threshold()[2]


def test_a_signal_waits_for_open_requests_and_a_second_one_does_not(
    checkpoint: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with (
        log.open("w") as file,
        server_process(
            str(checkpoint), *SMALL, "--block-size", "16", "--speculative", "off", log=file
        ) as server,
    ):
        process, url = server.process, server.url
        messages = [{"role": "user", "content": "hi"}]
        body = {"messages": messages, "stream": True, "ignore_eos": True, "max_tokens": 2000}
        with (
            httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: client.get("/ready").status_code == 503)
            next(lines)
            assert process.poll() is None
            children = children_of(process.pid)
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0
            with contextlib.suppress(httpx.HTTPError):
                assert not any('"length"' in line for line in lines), "it has waited for the end"
            wait_for(lambda: not any(map(runs, children)))
    assert "Traceback" not in log.read_text()


def test_every_signal_is_ignored_or_an_orderly_end(checkpoint: Path, tmp_path: Path) -> None:
    """Also if nobody reads the log, and the terminal that is closed sends two of them."""
    stored = tmp_path / "stored"
    reading, writing = os.pipe()
    with (
        os.fdopen(writing, "w") as log,
        server_process(
            str(checkpoint), *SMALL, "--disk-cache-path", str(stored), "--disk-cache-size", "64MiB",
            "--log-level", "debug", log=log, environment={"PYTHONFAULTHANDLER": "1"},
        ) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as client,
    ):  # fmt: skip
        process = server.process
        for each in (signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(each)
        messages = [{"role": "user", "content": "Tell me of it. " * 40}]
        body = {"messages": messages, "max_tokens": 1, "temperature": 0}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        for _ in range(350):  # More lines than a pipe holds.
            assert client.get("/v1/models/none").status_code == 404
            client.post("/v1/chat/completions", json={**body, "messages": []})
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGHUP)
        try:
            assert process.wait(SECONDS) == 0
        except subprocess.TimeoutExpired:
            pytest.fail(f"it does not end: {stacks_of(process, reading)}")
        os.close(reading)
    with contextlib.closing(sqlite3.connect(stored / "vlm-serve-cache.sqlite")) as entries:
        assert entries.execute("SELECT count(*) FROM entries").fetchone()[0] > 0


def stacks_of(process: subprocess.Popen[str], log: int) -> str:
    """Abort a process; return what its threads were at, from the end of its log."""
    os.set_blocking(log, False)
    said = bytearray()
    for number in (None, signal.SIGABRT):
        if number is not None:
            process.send_signal(number)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                said += os.read(log, 1 << 16)
            time.sleep(0.01)
    return said[-20_000:].decode(errors="replace")


@pytest.mark.processes
def test_a_server_that_is_not_to_notice_a_closed_terminal_does_not(checkpoint: Path) -> None:
    start = ("nohup", *COMMAND)
    with server_process(str(checkpoint), *SMALL, start=start) as server:
        server.process.send_signal(signal.SIGHUP)
        assert httpx.get(f"{server.url}/ready", timeout=SECONDS, trust_env=False).status_code == 200
        server.process.send_signal(signal.SIGQUIT)
        assert server.process.wait(SECONDS) == 0


@pytest.mark.processes
def test_chat_answers_about_a_photograph(checkpoint: Path) -> None:
    spec = importlib.util.find_spec("skimage")
    assert spec is not None
    assert spec.origin is not None
    photograph = Path(spec.origin).parent / "data" / "rocket.jpg"
    arguments = ["--model", str(checkpoint), "--image", str(photograph), "What is this?"]
    done = subprocess.run(
        [*COMMAND, "chat", *arguments, *SMALL, "--max-tokens", "8", "--temperature", "0"]
        # Whatever a random model says counts as text, a thought that it opens included.
        + ["--report", "--reasoning-parser", "none"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "media_encoded: 1" in done.stderr


@pytest.mark.processes
def test_chat_does_not_wait_for_a_compiler(checkpoint: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "chat", "--model", str(checkpoint), "Hello", *SMALL, "--max-tokens", "2"],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_chat_says_what_is_wrong(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(checkpoint), "--image", str(tmp_path / "none.png"), "What?"]
    done = subprocess.run(
        [*COMMAND, "chat", *arguments, *SMALL],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("vlm-serve: ")
    assert "none.png" in done.stderr
    assert "Traceback" not in done.stderr
