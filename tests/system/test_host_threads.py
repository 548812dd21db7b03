"""Nothing but a working engine keeps OpenMP workers: see `vlm_serve.system.host_threads`."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, threading
import torch
from PIL import Image
from vlm_serve import EngineConfig, Pipeline, SamplingParams
from vlm_serve.system.host_threads import release_worker_threads, releasing

def workers():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

def compute():
    torch.ones(1 << 22).exp()
    return workers()

def released():
    idle = workers()
    assert compute() == idle + 1
    release_worker_threads()
    assert workers() == idle
    assert releasing(compute)() == idle + 1 and workers() == idle

def engine():
    idle = workers()
    picture = Image.new("RGB", (640, 640), "red")
    with Pipeline("demo", EngineConfig(threads=2)) as pipe:
        assert workers() == idle, "loading left workers behind"
        pipe(("What colour is it? " * 400, picture), SamplingParams(max_tokens=2))
        pipe.engine.check()  # The engine's thread has finished its step and waits again.
        assert workers() == idle, "the request left workers behind"

torch.set_num_threads(2)  # Starts a worker of another kind, once.
{"released": released, "engine": engine}[sys.argv[1]]()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp, and /proc to see its threads")
@pytest.mark.parametrize("what", ["released", "engine"])
def test_workers_are_given_back(what: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
