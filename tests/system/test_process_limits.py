"""Limits of the shell that are too small are a sentence."""

from __future__ import annotations

import resource
import shlex
import subprocess
from pathlib import Path

import pytest
from server_process import COMMAND
from sweeps import quick

from vlm_serve.cli import main
from vlm_serve.engine.steps.memory import free_host_memory
from vlm_serve.system.process_limits import free_address_space

SMALL = ("--device", "cpu", "--cache-memory", "32MiB", "--max-model-len", "2048", "--threads", "1")
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("-v 400000", "address space (ulimit -v) is 400000 KiB"),
        ("-v 900000", "address space (ulimit -v) is 900000 KiB"),
        ("-n 12", "open files (ulimit -n) is 12"),
    ],
)
@pytest.mark.parametrize("command", quick(["serve", "chat hello", "deploy"], 1))
def test_limits_too_small_are_a_sentence(command: str, limit: str, words: str) -> None:
    line = f"ulimit {limit}; exec {shlex.join([*COMMAND, *command.split(), *SMALL])}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_memory_that_ran_out_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: object) -> int:
        raise MemoryError("no address space for 5 bytes")

    monkeypatch.setattr("vlm_serve.cli.run_doctor", run)
    assert main(["doctor"]) == 1
    unlimited = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 30, 1 << 30))
    assert main(["doctor"]) == 1
    monkeypatch.setattr(resource, "getrlimit", lambda kind: unlimited)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "memory ran out: no address space for 5 bytes; the limit of" in lines[1]
    assert lines[2] == "vlm-serve: memory ran out: no address space for 5 bytes"


def test_the_cache_takes_a_share_of_the_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = free_host_memory()
    limit = (1 << 50, 1 << 50)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limit)
    assert free_host_memory() <= whole + (1 << 28)
    limit = (1, 1)
    assert free_address_space() == 0
    assert free_host_memory() == 0
