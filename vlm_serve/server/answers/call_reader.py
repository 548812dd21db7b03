"""Forms of tool calls as data, and the engine that reads a call however its text is cut.

It finds the marks of a form. A subclass per syntax says what they do. A form in tags has the marks
and what each does in each state as data: a new one needs a `CallForm` here, and `TagReader` runs
all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import regex

from vlm_serve.server.answers.pieces import (
    THINK_END,
    TOOL_END,
    TOOL_START,
    ParsedCall,
    Piece,
    Reading,
    ToolForm,
    Tools,
)

HELD = 64
"""Length from which an open text is told as it comes. Until then a call may still become text."""


@dataclass(frozen=True, slots=True)
class Mark:
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

    Attributes:
        nested: a value may contain a whole call.
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
        self.nested = False
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
            match = _pattern(self._marks, self._thought).search(text, at, partial=True)
            for plain in _split(text[at : match.start()]):
                at += len(plain)
                self._size += len(plain)
                reading = self._text(plain)
                if reading is not None:
                    return reading
                if self._state != state:
                    break
            if self._state != state:
                continue
            if match.partial:
                self._tail = text[match.start() :]
                return None
            at, start = match.end(), self._size
            self._size += len(match.group())
            name = match.group(match.lastgroup).strip().strip("\"'")
            reading = self._mark(Mark(match.lastgroup, name, match.group(), start, self._size))
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
    def _mark(self, mark: Mark) -> Reading | None:
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

    def _reading(self, size: int, calls: Sequence[ParsedCall]) -> Reading:
        """Return the result, with calls that continue what has been told."""
        checked = []
        for index, call in enumerate(calls):
            told = self.told(index)
            fits = told is None or call.arguments.startswith(told)
            checked.append(call if fits else ParsedCall(call.name, told or "", whole=False))
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


Framing = Literal["line", "space"]
"""White space around a value that belongs to the form: one line break on each side, or all."""

Step = tuple[str, str] | tuple[str, str, bool]
Steps = Mapping[str, Mapping[str, Step]]
"""State -> kind of mark -> the next state, the reader's action, and what the action is told.

A mark without a step is text. Before the first value there is no text, so it ends the reading.
"""


@dataclass(frozen=True, slots=True)
class CallForm:
    """A form of tool calls.

    Attributes:
        openings: texts that may begin a call.
        marks: pattern of the marks of all states that `marks_in` does not name. A group names the
            kind of each; where the mark contains a name, the group is that name.
        framing: see `Framing`.
    """

    openings: tuple[str, ...]
    marks: str
    steps: Steps
    marks_in: Mapping[str, str] = field(default_factory=dict)
    framing: Framing = "line"


BLOCK_MARKS = f"(?P<block>{TOOL_START})|(?P<end_block>{TOOL_END})"
_QUOTED = r"""(?:"(?P<{0}>[^<>"\n]{{1,256}})"|'(?P<{0}>[^<>'\n]{{1,256}})')>"""
_END_VALUE = "(?P<end_value></parameter>)"

# What may follow a value. A step told False passes over a closing tag that the model left out, so
# that another ending of the call is preferred.
_VALUE: Mapping[str, Step] = {
    "value": ("value", "next_value"),
    "call": ("value", "next_call"),
    "end_value": ("closed", "close", True),
}
_QWEN_VALUE = {
    **_VALUE,
    "block": ("value", "next_block"),
    "end_call": ("ended", "close", False),
}
_MINICPM_VALUE = {**_VALUE, "end_call": ("done", "close", False)}

QWEN3_XML = CallForm(
    openings=(TOOL_START, "<function="),
    marks=rf"{BLOCK_MARKS}|{_END_VALUE}|(?P<end_call></function>)"
    r"|<function=(?P<call>[^<>\n]{1,256})>|<parameter=(?P<value>[^<>\n]{1,256})>",
    steps={
        "start": {"block": ("opened", "go_on"), "call": ("named", "begin_call")},
        "opened": {"call": ("named", "begin_call")},
        "named": {
            "value": ("value", "begin_value"),
            "end_call": ("ended", "extend", True),
            "end_block": ("done", "end_without_values"),
        },
        "value": _QWEN_VALUE,
        "closed": {
            **_QWEN_VALUE,
            "end_call": ("ended", "extend", True),
            "end_block": ("done", "extend", False),
        },
        "ended": {
            **_QWEN_VALUE,
            "block": ("ended", "next_block"),
            "end_block": ("done", "extend", True),
        },
        "done": {**_QWEN_VALUE, "block": ("done", "next_block")},
    },
)
"""Qwen3-Coder, Qwen3.5 and later, MiniCPM-V 4.6."""

MINICPM5 = CallForm(
    openings=('<function name="', "<function name='"),
    marks="<function name="
    + _QUOTED.format("call")
    + "|<param name="
    + _QUOTED.format("value")
    + r"|(?P<end_value></param>)|(?P<end_call></function>)|(?P<raw><!\[CDATA\[)",
    steps={
        "start": {"call": ("named", "begin_call")},
        "named": {"value": ("value", "begin_value"), "end_call": ("done", "extend", True)},
        "value": {**_MINICPM_VALUE, "raw": ("raw", "begin_raw")},
        "raw": {"end_raw": ("unraw", "go_on")},
        "unraw": {
            "end_value": ("closed", "close", True),
            "end_call": ("done", "close", False),
        },
        "closed": {**_MINICPM_VALUE, "end_call": ("done", "extend", True)},
        "done": _MINICPM_VALUE,
    },
    marks_in={"raw": r"(?P<end_raw>\]\]>)"},
    framing="space",
)
"""MiniCPM5: values may stand in CDATA sections."""

FORMS: Mapping[ToolForm, CallForm] = {"qwen3_xml": QWEN3_XML, "minicpm5": MINICPM5}

ENFORCED: Mapping[ToolForm, CallForm] = {
    **FORMS,
    "qwen3_xml": replace(QWEN3_XML, marks_in={"value": _END_VALUE}),
}
"""Forms of calls that a grammar enforces: no tag is missing, so none is looked for in values."""
