"""`vlm-serve serve` with the options of operators, as a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
from serving import chat_body, wait_for

START = [sys.executable, "-m", "vlm_serve.cli", "serve", "demo", "--device", "cpu"]
SMALL = ["--cache-memory", "32MiB", "--threads", "1", "--max-model-len", "1024"]


def test_a_server_on_a_unix_socket_that_logs_nothing(tmp_path: Path) -> None:
    path, log = tmp_path / "s", tmp_path / "log"
    options = ["--uds", str(path), "--log-level", "warning", "--no-access-log"]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*START, *SMALL, *options], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        table = ""
        while "URL " not in table:
            line = process.stdout.readline()
            assert line, log.read_text()
            table += line
        assert f"http://unix:{path}:/v1" in table
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as client:
            answer = client.post("http://x/v1/chat/completions", json=chat_body(max_tokens=2))
            assert answer.status_code == 200
            for route in ("get_model_info", "server_info", "ping", "v1/models"):
                assert client.get(f"http://x/{route}").status_code == 200
            info = client.get("http://x/server_info").json()
            assert info["engine"]["max_model_len"] == info["context_length"] == 1024
            assert client.post("http://x/reset_prefix_cache").status_code == 200
            stats = client.get("http://x/v1/cache/stats").json()
            assert stats["held_bytes"]["kv"] == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        wait_for(lambda: not path.exists())
        assert log.read_text() == ""
    finally:
        process.kill()
        process.communicate()


def test_bad_files_end_the_start_before_the_model_is_loaded(tmp_path: Path) -> None:
    for options, said in (
        (["--uds", str(tmp_path / "none" / "s")], "vlm-serve: cannot listen on the Unix socket"),
        (["--ssl-certfile", "/none"], "vlm-serve: ssl_certfile: there is no file /none"),
        (["--ssl-keyfile", "/none"], "vlm-serve: ssl_keyfile needs ssl_certfile"),
        (["--root-path", "vlm"], "vlm-serve: root_path must be a path such as /vlm"),
    ):
        done = subprocess.run(
            [*START, "--port", "0", *options], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and done.stderr.startswith(said)
