"""No process outlives the one that it works for, however that ends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from process_tree import processes_below, runs
from server_process import server_process
from sweeps import quick
from system.test_child import SMALL, structured, with_picture
from waiting import wait_for

from vlm_serve.system import children

ROOT = Path(__file__).resolve().parent.parent.parent
COMPILING = """
import os, signal, sys, time
from vlm_serve.grammar import worker

def work():
    print(os.getpid(), flush=True)
    {work}

worker._forked(work, 600.0, 600.0)
"""

SUBREAPER = """
import os, signal, subprocess, sys
from vlm_serve.system import children

children.adopt_orphans()
sleeper = "import time; time.sleep(600)"
middle = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid)"
started = [
    subprocess.Popen([sys.executable, "-u", "-c", each, sleeper], stdout=subprocess.PIPE)
    for each in (middle, f"{middle}; {sleeper}")
]
pids = [int(each.stdout.readline()) for each in started] + [started[1].pid]
started[0].wait()
os.kill(pids[1], signal.SIGSTOP)
children.end_descendants(60)
print(*pids)
"""


@pytest.mark.parametrize(
    "work",
    [
        "time.sleep(600)",
        # More than a pipe holds: with a reading end of its own it would wait for itself.
        "time.sleep(1); return {'compiled': 'x' * (1 << 20)}",
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ],
)
def test_a_grammar_that_is_being_compiled_ends_with_its_compiler(work: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMPILING.format(work=work)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as compiler:
        assert compiler.stdout is not None
        child = int(compiler.stdout.readline())
        assert runs(child)
        compiler.kill()
    wait_for(lambda: not runs(child), 30)


def test_a_child_is_killed_with_its_parent_and_not_with_the_thread_that_asked() -> None:
    """Even if it is stopped."""
    program = (
        "import sys, threading, time\n"
        "from vlm_serve.system import child, children\n"
        "def start():\n"
        "    started = children.start('vlm_serve.grammar.worker', stdin=-1, stdout=-1,\n"
        "                             env=child.environment())\n"
        "    kept.append(started)\n"
        "kept = []\n"
        "thread = threading.Thread(target=start)\n"
        "thread.start(); thread.join(); time.sleep(1)\n"
        "print(kept[0].pid, kept[0].poll(), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        pid, ended = parent.stdout.readline().split()
        assert ended == "None"
        os.kill(int(pid), signal.SIGSTOP)
        parent.kill()
    wait_for(lambda: not runs(int(pid)), 30)


def test_a_subreaper_ends_all_that_its_children_have_started() -> None:
    """Orphans too, and those that are stopped."""
    done = subprocess.run(
        [sys.executable, "-c", SUBREAPER], capture_output=True, text=True, cwd=ROOT, check=True
    )
    pids = [int(each) for each in done.stdout.split()]
    assert len(pids) == 3 and not any(map(runs, pids))


def test_what_cannot_be_started_is_the_callers_error() -> None:
    with pytest.raises(FileNotFoundError):
        children.start("vlm_serve.grammar.worker", cwd="/nowhere")


@pytest.mark.parametrize("seed", quick(range(6), 1, pytest.mark.processes))
def test_nothing_is_left_of_a_server_that_is_killed(seed: int) -> None:
    """At any moment, with decoders and compilers at work."""
    chance = random.Random(seed)
    pattern = "(" + "|".join(f"[a-z]{{{n},{n + 40}}}{n}" for n in range(30)) + ")"
    below: dict[int, str] = {}
    with server_process("demo", *SMALL) as server:

        def ask(number: int) -> None:
            with (
                contextlib.suppress(httpx.HTTPError),
                httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
            ):
                body = with_picture() if number % 2 else structured()
                if not number % 2:
                    body["structured_outputs"] = {"regex": f"{pattern}{number}"}
                client.post("/v1/chat/completions", json=body)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + chance.uniform(0.2, 4)
        while time.monotonic() < until or len(below) < 2:
            below |= processes_below(server.process.pid)
            time.sleep(0.01)
        server.process.kill()
        for thread in threads:
            thread.join()
    for pid, line in below.items():
        until = time.monotonic() + 10
        while runs(pid):
            assert time.monotonic() < until, line
            time.sleep(0.01)
