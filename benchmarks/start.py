"""Measure how long a start takes, and which part of it is reading config.json by transformers.

    python benchmarks/start.py [--before FOLDER] [--rounds 10]

Every round runs each side once, in a process of its own: "engine" loads the demo and is ready for
its first request, "plan" is `vlm-serve plan demo`. `--before` is the checkout of an earlier commit.
"config" is the time inside of the engine's process that the spec takes to be read, imports
included, after everything else has been imported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common.machine import commit, describe

ROOT = Path(__file__).resolve().parents[1]
ENGINE = """
from vlm_serve.engine.engine import Engine
Engine.from_checkpoint("demo").close()
"""
PLAN = """
from vlm_serve.cli import main
main(["plan", "demo", "--cache-memory", "64MiB"])
"""
CONFIG = """
import time
import vlm_serve.engine.engine, vlm_serve.engine.start.build
from vlm_serve.models import read_spec
from vlm_serve.engine.start.build import find_checkpoint
begin = time.perf_counter()
read_spec(find_checkpoint("demo"))
print(time.perf_counter() - begin)
"""


def run(program: str, folder: Path) -> tuple[float, str]:
    """Seconds of a process, and what it prints."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return time.perf_counter() - begin, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, help="checkout of a commit to compare with")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    print(describe(os.cpu_count() or 1))
    sides = {"ours": ROOT}
    if arguments.before is not None:
        sides["before"] = arguments.before.resolve()
        print(f"before: commit {commit(arguments.before)}")
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.rounds + 1):
        for what, program in (("engine", ENGINE), ("plan", PLAN)):
            for side, folder in sides.items():
                times.setdefault((what, side), []).append(run(program, folder)[0])
        times.setdefault(("config", "ours"), []).append(float(run(CONFIG, ROOT)[1]))
    print("\n| what | side | median, s | best, s |\n|---|---|---|---|")
    for (what, side), seconds in times.items():
        counted = seconds[1:]  # The first round fills caches.
        print(f"| {what} | {side} | {statistics.median(counted):.2f} | {min(counted):.2f} |")


if __name__ == "__main__":
    main()
