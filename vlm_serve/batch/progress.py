"""Progress of a run: one line on a terminal, periodic lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

TERMINAL_SECONDS = 0.2
LOG_SECONDS = 10.0
BAR_WIDTH = 24


class Progress:
    """Counts finished jobs.

    Args:
        total: jobs of the whole run.
        done, failed: jobs finished by an earlier run, and how many of them failed.
        out: output stream, by default standard error.
    """

    def __init__(
        self, total: int, done: int = 0, failed: int = 0, out: TextIO | None = None
    ) -> None:
        self._out = sys.stderr if out is None else out
        self._terminal = self._out.isatty()
        self._total, self._before, self._done = total, done, done
        self._failed = failed
        self._prompt = self._cached = 0
        self._shown = time.monotonic()
        self._first: float | None = None  # when the first job of this run ended

    def add(self, *, failed: bool, prompt_tokens: int, cached_tokens: int) -> None:
        """Count one finished job."""
        self._done += 1
        self._failed += failed
        self._prompt += prompt_tokens
        self._cached += cached_tokens
        now = time.monotonic()
        self._first = self._first or now
        if now - self._shown >= (TERMINAL_SECONDS if self._terminal else LOG_SECONDS):
            self._shown = now
            self._show(now, "\r" if self._terminal else "")

    def close(self) -> None:
        """Show the final count."""
        self._show(time.monotonic(), "\r" if self._terminal else "")
        if self._terminal:
            self._out.write("\n")

    def _show(self, now: float, start: str) -> None:
        filled = BAR_WIDTH * self._done // max(self._total, 1)
        text = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {self._done}/{self._total}, "
        text += f"{self._failed} failed"
        # The first job waited for the start of the model, so the rate begins behind it.
        ended = self._done - self._before - 1
        if ended > 0 and self._first is not None:
            rate = ended / max(now - self._first, 1e-6)
            text += f", {rate:.2f}/s"
            if self._done < self._total:
                text += f", {(self._total - self._done) / rate:.0f} s left"
        if self._prompt:
            text += f", {percent(self._cached, self._prompt)} cached"
        self._out.write(f"{start}{text:<100}" if self._terminal else f"{text}\n")
        self._out.flush()


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"


SOME_FAILED = 3
"""Exit status of a completed run with failed jobs."""
_MOST_NAMED = 20


def verdict(failures: Sequence[str], output: Path) -> int:
    """Print the failures of this and earlier runs; return the exit status."""
    if not failures:
        return 0
    print(f"{len(failures)} failed; the reasons are in {output}:", file=sys.stderr)
    for line in failures[:_MOST_NAMED]:
        print(f"  {line}", file=sys.stderr)
    if len(failures) > _MOST_NAMED:
        print(f"  and {len(failures) - _MOST_NAMED} more", file=sys.stderr)
    return SOME_FAILED
