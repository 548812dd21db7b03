"""Regular expressions that come from files, matched within a limit of time.

Python's `re` may need years for a pattern of a few letters, and holds the interpreter's lock
meanwhile, so no other thread runs. The package `regex` has the same patterns, lets other threads
run, and ends after a time limit. What it does not limit is compiling, where repeated groups are
written out, so their size is checked first. Syntax of `regex` alone is refused.
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
MAX_REPEATED = 1 << 16
"""Characters that repetitions add to the patterns of a file where they are written out."""
MAX_SECONDS = 2.0
"""Processor time for the patterns of a file, besides what each use of one may take."""
MAX_FREE_SECONDS = 60.0
"""Processor time that does not count: models of many experts have some hundred thousand modules."""
_FREE_MATCH, _FREE_COMPILING = 1e-4, 5e-3
"""Seconds of each use that do not count."""
_SHOWN = 80
_ESCAPE = r"\\(?:[abdfnrstuvwxABDSUWZ0-9]|[^A-Za-z0-9])"
_TOKEN = re.compile(
    rf"""(?P<closed>\))
    |\(\?[aiLmsux]+\)
    |(?P<opened>\((?![?*])
        |\(\?(?:[:=!>]|<[=!]|P<\w+>|\((?!DEFINE\))\w+\)|[aiLmsux]*(?:-[imsx]+)?:))
    |(?P<times>[*+?]|\{{\d*,?\d*\}})[?+]?
    |{_ESCAPE}|\[\^?\]?(?:{_ESCAPE}|(?!\[:)[^\]\\])*\]
    |\(\?P=\w+\)|\(\?\#[^)]*\)|[^\\\[({{]""",
    re.VERBOSE,
)
"""A piece of an expression, with the same meaning to `re` and to `regex`."""
_TIMES = re.compile(r"\+|\{\d+,?\d*\}")
_VERBOSE = re.compile(r"\(\?[aiLmsu]*x")


class Budget:
    """What is left to the patterns of a file: seconds of a processor, and repeated characters."""

    def __init__(self, free: float = MAX_FREE_SECONDS) -> None:
        self.seconds = MAX_SECONDS
        self.free = free
        self.repeated = MAX_REPEATED

    def spend(self, seconds: float, free: float) -> None:
        """Count the time of a use, without its first `free` seconds."""
        unpaid = max(0.0, min(seconds, free, self.free))
        self.free -= unpaid
        self.seconds -= seconds - unpaid


_BUDGET: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def patterns_of_one_file(free: float = MAX_FREE_SECONDS) -> Iterator[None]:
    """Give all patterns that are made meanwhile one budget, for as long as they live.

    Args:
        free: seconds for all uses that take little time.
    """
    token = _BUDGET.set(Budget(free))
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
        begun = time.thread_time()
        try:
            self.budget.repeated -= _written_out(text) - len(text)
            if self.budget.repeated < 0:
                raise self._error("repeats too much, or those before it: choose smaller counts")
            if self.budget.seconds <= 0:
                raise TimeoutError
            self._compiled = regex.compile(text, cache_pattern=False)
            if before or behind:
                self._compiled = regex.compile(before + text + behind, cache_pattern=False)
        except (regex.error, ValueError, OverflowError) as error:
            raise self._error(f"is no pattern: no regular expression ({error})") from None
        except RecursionError:
            raise self._error("is nested too deeply") from None
        except (TimeoutError, MemoryError):
            raise self._too_long() from None
        finally:
            self.budget.spend(time.thread_time() - begun, _FREE_COMPILING)

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
            raise self._too_long() from None
        finally:
            self.budget.spend(time.thread_time() - begun, _FREE_MATCH)

    def _too_long(self) -> CheckpointError:
        self.budget.seconds = 0.0
        return self._error("takes too long, or those before it: write simpler ones")

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


def _written_out(text: str) -> int:
    """Return the length of an expression with its repetitions written out, at most.

    `regex` writes a repeated part as often as it must match, and once more if it may go on.

    Raises:
        regex.error: it has syntax that `re` has not.
    """
    total, last, at = 0, 0, 0
    outer: list[int] = []
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise regex.error("syntax unknown to Python's re, or a brace", text, at)
        at = token.end()
        if token["opened"]:
            outer.append(total + len(token[0]))
            total = last = 0
            continue
        if token["closed"] and outer:
            last, total = total + 1, total + 1 + outer.pop()
        elif token["times"]:
            total, last = (
                total + last * (_copies(token["times"]) - 1),
                last * _copies(token["times"]),
            )
        else:
            last = len(token[0])
            total += last
    if _VERBOSE.search(text):  # Comments may hide brackets: as if all were nested.
        return len(text) * math.prod(_copies(count) for count in _TIMES.findall(text))
    return total


def _copies(times: str) -> int:
    """Return how often `regex` writes a part that is repeated: `+`, `{2}` or `{2,5}` times."""
    if times == "+":
        return 2
    least, comma, most = times.strip("{}*?").partition(",")
    count = int(least or 0)
    return max(1, count + (bool(comma) and count > 0 and least != most))
