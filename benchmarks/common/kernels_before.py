"""Run the same kernel cases at an earlier commit and at this one, in two child processes.

Neither is this process: what runs after another process, whose idle OpenMP workers spin for a
while, is up to a quarter slower than what runs after something else, whatever it is. So the two
commits are in the same place, and take turns at being the first.
"""

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
    """Two children: of the earlier commit, and of this one.

    Args:
        folder: checkout of the earlier commit.
        root: of this one.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self._children = [_Child(folder), _Child(root)]
        self._number = 0

    def next(self) -> list[str]:
        """Goes on to the next case; what can be run in it."""
        runnable = [child.next() for child in self._children]
        assert runnable[0] == runnable[1], "the commits have different cases"
        return runnable[1]

    def run(self, key: str, repeats: int = 1) -> tuple[float, float]:
        """Seconds of one call before and now, as means over that many."""
        self._number += 1
        seconds = [0.0, 0.0]
        for side in (0, 1) if self._number % 2 else (1, 0):
            seconds[side] = self._children[side].run(key, repeats)
        return seconds[0], seconds[1]

    def close(self) -> None:
        for child in self._children:
            child.close()


class _Child:
    """The parent's side of one.

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
