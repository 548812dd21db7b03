"""The engine that reads a tool call of any form, however the text is cut into chunks.

It finds the marks of a `CallForm` and runs their steps. A subclass per syntax has the actions.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from vlm_serve.server.answers.call_forms import ENFORCED, FORMS, Mark
from vlm_serve.server.answers.pieces import (
    THINK_END,
    Call,
    Piece,
    Reading,
    ToolForm,
    Tools,
)

HELD = 64
"""Length from which an open text is told as it comes. Until then a call may still become text."""

_THINK_END = Mark("/think", THINK_END)


@dataclass(frozen=True, slots=True)
class Found:
    """A mark in the text, from `start` to `end`.

    Attributes:
        name: the name in it, without quotation marks; "": it has none.
    """

    kind: str
    name: str
    text: str
    start: int
    end: int


class CallReader(ABC):
    """Reads one block of calls, from its opening on.

    The result depends on the text alone, not on how it was cut. Every character is read a bounded
    number of times.

    Args:
        tools: the functions that may be called.
        thought: the text is inside a thought, which `</think>` may end anywhere.
        streamed: long arguments are told before the call is complete.
        single: at most one call is read.
        enforced: a grammar enforces the calls.
    """

    def __init__(
        self,
        form: ToolForm,
        tools: Tools,
        *,
        thought: bool = False,
        streamed: bool = False,
        single: bool = False,
        enforced: bool = False,
    ) -> None:
        self._marks_of, self._tools, self._enforced = form, tools, enforced
        self._form = (ENFORCED if enforced else FORMS)[form]
        self._thought, self._streamed, self._single = thought, streamed, single
        self._state = "start"
        self._parts: list[str] = []
        self._size = 0  # number of characters read
        self._tail = ""  # unread end, which may become a mark
        self._news: list[Piece] = []
        self._told: list[list[str]] = []  # argument text told so far, by call

    @property
    def text(self) -> str:
        """All text fed so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def feed(self, text: str) -> Reading | None:
        """Read the next text; return None if more is needed for a decision."""
        self._parts.append(text)
        text, at = self._tail + text, 0
        while True:
            state = self._state
            marks = _marks(self._marks_of, state, self._thought, self._enforced)
            found = marks.whole.search(text, at)
            stop = marks.partial_start(text, at) if found is None else found.start()
            for plain in _split(text[at:stop]):
                at += len(plain)
                self._size += len(plain)
                reading = self._text(plain)
                if reading is not None:
                    return reading
                if self._state != state:
                    break
            if self._state != state:
                continue
            if found is None:
                self._tail = text[stop:]
                return None
            at = found.end()
            reading = self._mark(marks.found(found, self._size))
            if reading is not None:
                return reading

    @abstractmethod
    def end(self, *, cut: bool) -> Reading:
        """Return the result at the end of the text.

        Args:
            cut: the token limit ended it, so an open call may be incomplete.
        """

    def news(self) -> list[Piece]:
        """Return what can be told of the calls since the last time, counting them from 0."""
        news, self._news = self._news, []
        return news

    def told(self, call: int) -> str | None:
        """Return the argument text told so far; None: nothing was told of the call."""
        return "".join(self._told[call]) if call < len(self._told) else None

    def _mark(self, found: Found) -> Reading | None:
        """Read a mark; return the result if it is certain."""
        self._size = found.end
        step = self._form.steps[self._state].get(found.kind)
        if step is None:
            return self._no_step(found)
        self._state = step[0]
        reading: Reading | None = getattr(self, f"_{step[1]}")(found)
        return reading

    @abstractmethod
    def _text(self, plain: str) -> Reading | None:
        """Read text between marks; return the result if it is certain."""

    @abstractmethod
    def _no_step(self, found: Found) -> Reading | None:
        """Read a mark without step in this state."""

    def _no_action(self, found: Found) -> None:  # noqa: B027
        """Only change the state."""

    def _tell(self, call: int, name: str, text: str) -> None:
        """Tell the next argument text of a call."""
        if call == len(self._told):
            self._told.append([])
            self._news.append(Piece("tool_name", name, call))
        self._told[call].append(text)
        if self._news and self._news[-1].call == call and self._news[-1].kind == "tool_arguments":
            text = self._news.pop().text + text
        self._news.append(Piece("tool_arguments", text, call))

    def _reading(self, size: int, calls: Sequence[Call]) -> Reading:
        """Return the result, with calls that continue what has been told."""
        checked = []
        for index, call in enumerate(calls):
            told = self.told(index)
            fits = told is None or call.arguments.startswith(told)
            checked.append(call if fits else Call(call.name, told or "", whole=False))
        return Reading(size, checked)


def _split(text: str) -> list[str]:
    """Split text behind its first character that is no white space.

    That character may change the state, and with it the marks.
    """
    size = len(text) - len(text.lstrip()) + 1
    return [part for part in (text[:size], text[size:]) if part]


class _Marks:
    """The marks of one state, as patterns."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._marks = marks
        self.whole = re.compile("|".join(map(_whole, range(len(marks)), marks)))
        partial = "|".join(start for mark in marks for start in _starts(mark))
        self._partial = re.compile(rf"(?:{partial})\Z" if partial else r"(?!)")
        self._longest = max(len(mark.begin + mark.end) + mark.longest for mark in marks)

    def partial_start(self, text: str, at: int) -> int:
        """Return where a mark begins that the text does not complete, or the text's end."""
        found = self._partial.search(text, max(at, len(text) - self._longest))
        return len(text) if found is None else found.start()

    def found(self, match: re.Match[str], start: int) -> Found:
        """Return the mark of a match of `whole`, at its place in the block."""
        assert match.lastgroup is not None
        mark, text = self._marks[int(match.lastgroup[1:])], match.group()
        name = text[len(mark.begin) : len(text) - len(mark.end)].strip().strip("\"'")
        return Found(mark.kind, name, text, start, start + len(text))


@lru_cache
def _marks(form: ToolForm, state: str, thought: bool, enforced: bool) -> _Marks:
    found = (ENFORCED if enforced else FORMS)[form]
    marks = found.marks_in.get(state, found.marks)
    return _Marks((*marks, _THINK_END) if thought else marks)


def _whole(index: int, mark: Mark) -> str:
    """Return the pattern of a mark, as a group."""
    name = f"(?:{mark.inner}){{1,{mark.longest}}}" if mark.inner else ""
    return f"(?P<m{index}>{re.escape(mark.begin)}{name}{re.escape(mark.end)})"


def _starts(mark: Mark) -> list[str]:
    """Return patterns of the proper prefixes of a mark."""
    begin = re.escape(mark.begin)
    starts = [re.escape(mark.begin[:size]) for size in range(1, len(mark.begin))]
    if mark.inner:
        name = f"(?:{mark.inner}){{0,{mark.longest if mark.end else 0}}}"
        starts += [
            f"{begin}{name}{re.escape(mark.end[:size])}" for size in range(len(mark.end) or 1)
        ]
    return starts
