"""The engine that reads a tool call of any form, however the text is cut into chunks.

It finds the marks of a form. A subclass per syntax says what they do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import regex

from vlm_serve.server.answers.pieces import THINK_END, Call, Piece, Reading, Tools

HELD = 64
"""Length from which an open text is told as it comes. Until then a call may still become text."""


@dataclass(frozen=True, slots=True)
class Found:
    """A mark in the text, from `start` to `end`.

    Attributes:
        name: the name in it, without quotation marks, if its kind has one.
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
        tools: Tools,
        *,
        thought: bool = False,
        streamed: bool = False,
        single: bool = False,
        enforced: bool = False,
    ) -> None:
        self._tools, self._enforced = tools, enforced
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
            found = _pattern(self._marks, self._thought).search(text, at, partial=True)
            for plain in _split(text[at : found.start()]):
                at += len(plain)
                self._size += len(plain)
                reading = self._text(plain)
                if reading is not None:
                    return reading
                if self._state != state:
                    break
            if self._state != state:
                continue
            if found.partial:
                self._tail = text[found.start() :]
                return None
            at, start = found.end(), self._size
            self._size += len(found.group())
            name = found.group(found.lastgroup).strip().strip("\"'")
            reading = self._mark(Found(found.lastgroup, name, found.group(), start, self._size))
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

    @property
    @abstractmethod
    def _marks(self) -> str:
        """Pattern of the marks in this state; the name of a mark's group is its kind."""

    @abstractmethod
    def _text(self, plain: str) -> Reading | None:
        """Read text between marks; return the result if it is certain."""

    @abstractmethod
    def _mark(self, found: Found) -> Reading | None:
        """Read a mark; return the result if it is certain."""

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


@lru_cache
def _pattern(marks: str, thought: bool) -> regex.Pattern[str]:
    return regex.compile(marks + f"|(?P<end_thought>{THINK_END})" * thought)


def _split(text: str) -> list[str]:
    """Split text behind its first character that is no white space.

    That character may change the state, and with it the marks.
    """
    size = len(text) - len(text.lstrip()) + 1
    return [part for part in (text[:size], text[size:]) if part]
