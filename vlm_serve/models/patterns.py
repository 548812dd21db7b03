"""Regular expressions that come from files, matched within a limit of time.

Python's `re` may need years for a pattern of a few letters, and holds the interpreter's lock
meanwhile, so no other thread runs. The package `regex` has the same patterns, lets other threads
run, and ends after a time limit. What it does not limit is compiling, where counted repetitions are
written out, so their size is checked first.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import regex

from vlm_serve.errors import CheckpointError

MAX_PATTERN = 4096
"""Characters of a pattern."""
MAX_NAME = 2048
"""Characters of a name that is matched."""
MAX_REPEATED = 1 << 18
"""Characters that counted repetitions add to the patterns of a file, as if all were nested."""
MAX_SECONDS = 2.0
"""Processor time for the patterns of a file, besides what each use of one may take."""
_FREE_SECONDS = 1e-4
"""What a match may take without counting: models of many experts have some hundred thousand."""
_SHOWN = 80
_LEAST = re.compile(r"\{(\d+)(?:,\d*)?\}")
"""A counted repetition. So many times, at least, `regex` writes it out."""
_BRACES = re.compile(r"(?<!\\)(?:\\\\)*\{(?!\d*,?\d*\})")
"""A brace without a count. To `re` it is a character, to `regex` it may be an approximate match."""
_OTHER_GROUP = re.compile(r"\(\?(?![:=!>(#aiLmsux-]|<[=!]|P[<=])")
"""A group that `regex` has and `re` has not, such as a pattern within itself."""


class Budget:
    """What is left to the patterns of a file: seconds of a processor, and repeated characters."""

    def __init__(self, seconds: float = MAX_SECONDS, repeated: int = MAX_REPEATED) -> None:
        self.seconds = seconds
        self.repeated = repeated


_BUDGET: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def patterns_of_one_file() -> Iterator[None]:
    """Give all patterns that are made meanwhile one budget, for as long as they live."""
    token = _BUDGET.set(Budget())
    try:
        yield
    finally:
        _BUDGET.reset(token)


class Pattern:
    """A regular expression of a file, with the meaning that it has to Python's `re`.

    Args:
        text: as in the file.
        place: file and field, for messages.
        before, behind: expressions around it. It must be an expression without them.

    Raises:
        CheckpointError: it is none, or it is too long.
    """

    def __init__(self, text: str, place: str, before: str = "", behind: str = "") -> None:
        self._arguments = text, place, before, behind
        self.budget = _BUDGET.get() or Budget()
        if len(text) > MAX_PATTERN:
            raise self._error(f"has {len(text)} characters, more than {MAX_PATTERN}")
        self.budget.repeated -= _repeated(text)
        if self.budget.repeated < 0:
            raise self._error("repeats too much, or those before it: choose smaller counts")
        try:
            if _BRACES.search(text) or _OTHER_GROUP.search(text):
                raise regex.error("a group or a brace that Python's re does not have")
            self._compiled = regex.compile(text, cache_pattern=False)
            if before or behind:
                self._compiled = regex.compile(before + text + behind, cache_pattern=False)
        except (regex.error, ValueError, OverflowError) as error:
            raise self._error(f"is no pattern: no regular expression ({error})") from None
        except RecursionError:
            raise self._error("is nested too deeply") from None

    def match(self, name: str) -> bool:
        """Return True if it matches from the name's beginning on, as `re.match`.

        Raises:
            CheckpointError: that takes too long, or the name is too long for one.
        """
        if len(name) > MAX_NAME:
            raise CheckpointError(
                f"{name[:_SHOWN]!r}... has {len(name)} characters, too many for a module's name"
            )
        begun = time.thread_time()
        try:
            if self.budget.seconds <= 0:
                raise TimeoutError
            limit = self.budget.seconds
            return bool(self._compiled.match(name, concurrent=True, timeout=limit))
        except (TimeoutError, MemoryError):
            self.budget.seconds = 0.0
            raise self._error(
                "takes too long to match, or those before it: write simpler ones"
            ) from None
        finally:
            self.budget.seconds -= max(0.0, time.thread_time() - begun - _FREE_SECONDS)

    def _error(self, problem: str) -> CheckpointError:
        text, place, *_ = self._arguments
        shown = repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
        return CheckpointError(f"{place}: {shown} {problem}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self._arguments == other._arguments

    def __hash__(self) -> int:
        return hash(self._arguments)

    def __reduce__(self) -> tuple[type[Pattern], tuple[str, ...]]:
        return Pattern, self._arguments


def _repeated(text: str) -> int:
    """Return how many characters a pattern's counted repetitions add at most."""
    return len(text) * (math.prod(max(int(n), 1) for n in _LEAST.findall(text)) - 1)
