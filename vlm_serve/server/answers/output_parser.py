"""Splitting a streamed answer into reasoning, content and tool calls.

Text before `</think>` is reasoning. Tool calls have one of the forms in `call_reader`. A short call
is emitted when it is complete, since unparsable text is plain text. Long arguments are emitted as
they come; then the call stays incomplete if its end cannot be read. So does a call that the token
limit cuts.

A thought may contain calls for consideration only. They count if nothing but `</think>` or
the end of the answer follows the last one, or if there is no `</think>` at all.

Whole answers and streams use the same parser, so they cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import regex

from vlm_serve.engine.requests.outputs import FinishReason
from vlm_serve.preprocess.identity.prompt import SharedTokens
from vlm_serve.server.answers.call_reader import FORMS, CallReader
from vlm_serve.server.answers.json_calls import JsonReader
from vlm_serve.server.answers.pieces import (
    THINK_END,
    THINK_START,
    TOOL_START,
    Kind,
    ParsedCall,
    Piece,
    Reading,
    ToolForm,
    Tools,
)
from vlm_serve.server.answers.tag_calls import TagReader

_NESTED_READINGS = 8


class _State(Enum):
    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    FOLLOWED = "followed"
    """Calls inside a thought were read; the text after them decides whether they count."""


class OutputParser:
    """Parser of one choice.

    Args:
        reasoning: the answer starts inside a `<think>` block; None: reasoning is not split off.
        tools: {function name: JSON schema of its parameters}; None: calls stay in the text.
        form: form of the calls.
        parallel: more than one call is allowed.
        continued: the answer continues text at the end of the prompt.
        enforced: a grammar enforces the form of everything after the thought, calls included.
    """

    def __init__(
        self,
        *,
        reasoning: bool | None = None,
        tools: Tools | None = None,
        form: ToolForm = "qwen3_xml",
        parallel: bool = True,
        continued: bool = False,
        enforced: bool = False,
    ) -> None:
        self._tools, self._form = tools, form
        self._openings = FORMS[form].openings if form in FORMS else (TOOL_START,)
        self._parallel, self._enforced = parallel, enforced
        self._state = _State.REASONING if reasoning else _State.CONTENT
        self._buffer = ""
        self._may_think = reasoning is not None
        self._skip_space = bool(reasoning) and not continued
        self._space = ""  # white space that may be the indentation of the first line
        self._cut = False
        self._quoting = Quoting()
        self._reader: CallReader | None = None
        self._nested = 0  # readers so far of text with a quoted call
        self._thought = False
        self._lead = ""  # white space before the text that is being read
        self._pending: list[ParsedCall] = []
        self._pending_text = ""  # their text, and the white space before them
        self._scanned = -1  # end of the scanned text after them; -1: there is none yet
        self.num_calls = 0
        self.unfinished = False
        """A call was told that is not whole."""

    @property
    def in_content(self) -> bool:
        """True if the next text may be content."""
        return self._state is _State.CONTENT or (self._state is _State.CALL and not self._thought)

    def feed(self, text: str) -> list[Piece]:
        """Add text and return newly completed pieces."""
        self._buffer += text
        return self._run(final=False)

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """End the answer and return the remaining pieces.

        Args:
            cut: the token limit ended the answer. The prefix of a marker is then dropped, and an
                open call keeps its arguments so far, as a prefix of JSON.
        """
        self._cut = cut
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        steps = {_State.CALL: self._read, _State.FOLLOWED: self._follow}
        while steps.get(self._state, self._plain)(pieces, final):
            pass
        return pieces

    def _plain(self, pieces: list[Piece], final: bool) -> bool:
        """Emit text up to a marker, without the white space around the marker."""
        if not self._opened(final):
            return False
        thought = self._state is _State.REASONING
        may_call = self._tools is not None and (self._parallel or not self.num_calls)
        markers = (THINK_END,) * thought + self._openings * may_call
        marker = _first(self._buffer, markers) if markers else None
        if marker is None or marker.partial:
            self._emit(pieces, self._certain(marker, final))
            return False
        kept = len(self._buffer[: marker.start()].rstrip())
        lead = self._buffer[kept : marker.start()]
        self._emit(pieces, kept)
        self._buffer = self._buffer[len(lead) :]
        if marker.group() == THINK_END:
            self._end_thought()
        else:
            self._start_reading(lead, thought)
        return True

    def _opened(self, final: bool) -> bool:
        """Skip a `<think>` at the start; return False if more text is needed to tell."""
        start = self._buffer.lstrip()
        if self._may_think and start.startswith(THINK_START):
            self._buffer, self._state = start[len(THINK_START) :], _State.REASONING
            self._skip_space, self._space = True, ""
        elif self._may_think and THINK_START.startswith(start) and not final:
            return False
        self._may_think = False
        return True

    def _certain(self, begun: regex.Match[str] | None, final: bool) -> int:
        """Return how many characters of a buffer without markers are certainly text.

        Args:
            begun: the marker that may begin at its end; None: there are no markers.
        """
        if begun is not None and not final:
            return len(self._buffer[: begun.start()].rstrip())
        if begun is not None and self._cut:
            marker = THINK_END if self._state is _State.REASONING else TOOL_START
            held = _first(self._buffer, (marker,)).start()
            if held < len(self._buffer):
                self._buffer = self._buffer[:held].rstrip()
        return len(self._buffer)

    def _emit(self, pieces: list[Piece], length: int, *, quoted: bool = False) -> None:
        """Emit the start of the buffer as text."""
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if self._skip_space:
            text = self._without_space(text)
        if not text:
            return
        self._skip_space = False
        if not quoted:  # a call directly after a quoted one is quoted, too
            self._quoting.add(text)
        kind: Kind = "reasoning" if self._state is _State.REASONING else "content"
        pieces.append(Piece(kind, text))

    def _without_space(self, text: str) -> str:
        """Return text without the white space before it. An indentation of its first line stays."""
        text, self._space = self._space + text, ""
        rest = text.lstrip()
        _, line_end, indentation = text[: len(text) - len(rest)].rpartition("\n")
        if rest:
            return indentation + rest if line_end else rest
        self._space = line_end + indentation
        return ""

    def _end_thought(self) -> None:
        self._buffer = self._buffer[len(THINK_END) :]
        self._state = _State.CONTENT
        self._begin_text()

    def _begin_text(self) -> None:
        self._skip_space, self._space = True, ""
        self._quoting = Quoting()

    def _start_reading(self, lead: str, thought: bool) -> None:
        assert self._tools is not None
        options = {
            "thought": thought,
            "streamed": not thought and not self._quoting.quotes(lead),
            "single": not self._parallel,
            "enforced": self._enforced and not thought,
        }
        if self._form in FORMS:
            # Text with a quoted call may be read twice. This bounds the time of an answer.
            options["nesting"] = self._nested < _NESTED_READINGS
            self._reader = TagReader(self._form, self._tools, **options)
        else:
            self._reader = JsonReader(self._tools, **options)
        self._lead, self._thought, self._state = lead, thought, _State.CALL

    def _read(self, pieces: list[Piece], final: bool) -> bool:
        assert self._reader is not None
        text, self._buffer = self._buffer, ""
        reading = self._reader.feed(text) if text else None
        if reading is None and final:
            reading = self._reader.end(cut=self._cut)
        for piece in self._reader.news():
            pieces.append(Piece(piece.kind, piece.text, self.num_calls + piece.call))
        if reading is None:
            return False
        told = [self._reader.told(index) for index in range(len(reading.calls))]
        self._nested += self._reader.nested
        text, self._reader = self._reader.text, None
        self._buffer = text[reading.size :]
        self._decide(pieces, reading, text[: reading.size], told)
        return True

    def _decide(
        self, pieces: list[Piece], reading: Reading, text: str, told: Sequence[str | None]
    ) -> None:
        """Act on a reader's result.

        Args:
            told: what has been told of each call.
        """
        quoted = bool(reading.calls) and self._quoting.quotes(self._lead)
        called = bool(reading.calls) and not quoted
        if called and self._thought:
            self._pending += reading.calls
            self._pending_text += self._lead + text
            self._state = _State.FOLLOWED
        elif called:
            self._state = _State.CONTENT
            self._call(pieces, reading.calls, told)
        elif self._pending:
            self._buffer = self._lead + text + self._buffer
            self._state, self._scanned = _State.FOLLOWED, len(self._lead) + 1
        else:
            self._state = _State.REASONING if self._thought else _State.CONTENT
            if not reading.begun:
                text = self._lead + text
                self._buffer = text + self._buffer
                self._emit(pieces, len(text.rstrip()), quoted=quoted)

    def _call(
        self, pieces: list[Piece], calls: Iterable[ParsedCall], told: Sequence[str | None] = ()
    ) -> None:
        """Emit calls, less what has been told of them."""
        for call, sent in zip_longest(calls, told):
            if sent is None:
                pieces.append(Piece("tool_name", call.name, self.num_calls))
            rest = call.arguments[len(sent or "") :]
            if rest:
                pieces.append(Piece("tool_arguments", rest, self.num_calls))
            self.num_calls += 1
            self.unfinished |= not call.whole
        self._skip_space, self._space = True, ""

    def _follow(self, pieces: list[Piece], final: bool) -> bool:
        """Decide whether the calls at the end of a thought count."""
        start = self._buffer.lstrip()
        openings = self._openings
        if self._scanned < 0:
            if start.startswith(THINK_END):
                self._buffer = start
                return self._count(pieces, counts=not self._enforced)
            if start.startswith(openings) and self._parallel:
                self._start_reading(self._buffer[: len(self._buffer) - len(start)], thought=True)
                self._buffer = start
                return True
            if not final and any(marker.startswith(start) for marker in (THINK_END, *openings)):
                return False
            self._scanned = 0
        if start and not _first(self._buffer[self._scanned :], (THINK_END, TOOL_START)).partial:
            return self._count(pieces, counts=False)
        if final:
            cut = bool(start) and self._cut
            if cut and any(marker.startswith(start) for marker in (THINK_END, *openings)):
                self._buffer, cut = "", False  # the token limit cut the marker that follows
            return self._count(pieces, counts=not cut)
        self._scanned = max(self._scanned, len(self._buffer) - len(TOOL_START) + 1)
        return False

    def _count(self, pieces: list[Piece], *, counts: bool) -> bool:
        calls, text = self._pending, self._pending_text
        self._pending, self._pending_text, self._scanned = [], "", -1
        if counts:
            self._call(pieces, calls)
            self._state, self._quoting = _State.CONTENT, Quoting()
            self._buffer = self._buffer.removeprefix(THINK_END)
        else:
            self._state, self._buffer = _State.REASONING, text + self._buffer
            self._emit(pieces, len(text))
        return True


@lru_cache
def _pattern(markers: tuple[str, ...]) -> regex.Pattern[str]:
    return regex.compile("|".join(map(re.escape, markers)))


def _first(text: str, markers: tuple[str, ...]) -> regex.Match[str]:
    """Return the first marker in a text, or the beginning of one at its end, perhaps empty."""
    match = _pattern(markers).search(text, partial=True)
    assert match is not None
    return match


_MARK = re.compile(r"(?:\A|[\s(\[{:=])[`\"'“‘«]\Z")
_FENCE = re.compile(r"`{3,}[^\n`]{0,64}\n\s*\Z")
_KEPT = 160


@dataclass(slots=True)
class Quoting:
    """The text before a call, reduced to possible quotation marks.

    Attributes:
        tail: the last characters.
        fenced: an odd number of code fences precedes.
        ticks: number of backticks at the very end; more may follow.
    """

    tail: str = ""
    fenced: bool = False
    ticks: int = 0

    def add(self, text: str) -> None:
        """Add the next text."""
        for run in re.findall(r"`+|[^`]+", text) if "`" in text else (text,):
            if run[0] == "`":
                self.ticks += len(run)
            else:
                self._end_ticks()
        self.tail = (self.tail + text)[-_KEPT:]

    def quotes(self, space: str) -> bool:
        """Return True if a call after this white space is quoted.

        It is if a quotation mark precedes it directly, or the line before opens a code block.
        """
        before = self.tail + space
        if not space and _MARK.search(before):
            return True
        return self.fenced != (self.ticks >= 3) and _FENCE.search(before) is not None

    def _end_ticks(self) -> None:
        self.fenced ^= self.ticks >= 3
        self.ticks = 0


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A next turn whose client sends the parsed answer back.

    Attributes:
        kind: "agent" if the answer may call tools, "chat" otherwise.
        shared_tokens: compares the prompts.
        parser: makes a parser of one choice.
    """

    kind: str
    shared_tokens: SharedTokens
    parser: Callable[[], OutputParser]

    def shared(self, text: str, token_ids: Sequence[int], reason: FinishReason) -> int:
        """Return how many tokens the next prompt begins with, see `engine.request.NextTurn`."""
        parser = self.parser()
        pieces = parser.feed(text) + parser.finish(cut=reason != "stop")
        return self.shared_tokens(message_of(pieces), token_ids)


def message_of(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return the answer as clients of /v1/chat/completions send it back."""
    texts: dict[str, str] = {"reasoning": "", "content": ""}
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.kind == "tool_name":
            function = {"name": piece.text, "arguments": ""}
            calls.append({"id": f"call{len(calls):05}", "type": "function", "function": function})
        elif piece.kind == "tool_arguments":
            calls[piece.call]["function"]["arguments"] += piece.text
        else:
            texts[piece.kind] += piece.text
    message: dict[str, Any] = {"role": "assistant", "content": texts["content"] or None}
    if texts["reasoning"]:
        message["reasoning_content"] = texts["reasoning"]
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    return message
