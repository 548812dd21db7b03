"""The same kernel cases at an earlier commit, in a child process that is told which to run when."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

CHILD = "VLM_BENCHMARK_CHILD"
SETTLE_SECONDS = 0.005
"""Idle OpenMP workers of one process spin for a while, on the other's cores."""


class Before:
    """The parent's side.

    Args:
        folder: the checkout that the child imports `vlm_serve` from; otherwise it runs the same
            program with the same arguments, and so meets the same cases in the same order.
    """

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**os.environ, "PYTHONPATH": str(folder), CHILD: "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        imported = self._ask("file")
        assert Path(imported).is_relative_to(folder), f"{imported} is not in {folder}"

    def next(self) -> list[str]:
        """Goes on to the next case; what can be run in it."""
        runnable: list[str] = self._ask("next")
        return runnable

    def run(self, key: str, repeats: int = 1) -> float:
        """Seconds of one call, as a mean over that many."""
        time.sleep(SETTLE_SECONDS)
        seconds: float = self._ask(["run", key, repeats])
        time.sleep(SETTLE_SECONDS)
        return seconds

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, question: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of the earlier commit has ended")
        return json.loads(line)


def is_child() -> bool:
    return CHILD in os.environ


def serve(cases: Iterator[Mapping[str, Callable[[], object]]]) -> None:
    """The child's side, until its input ends."""
    import vlm_serve

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    case: Mapping[str, Callable[[], object]] = {}
    for line in sys.stdin:
        question = json.loads(line)
        if question == "file":
            answer: object = vlm_serve.__file__
        elif question == "next":
            del case  # Its tensors, before those of the next one.
            case = next(cases)
            answer = list(case)
        else:
            answer = timed(case[question[1]], question[2])
        print(json.dumps(answer), file=answers, flush=True)


def timed(function: Callable[[], object], repeats: int = 1) -> float:
    """Seconds of one call, as a mean over that many."""
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - begin) / repeats
