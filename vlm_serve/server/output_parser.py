"""Splits an answer, while it is being generated, into reasoning, content and tool calls.

What stands before `</think>` is reasoning; a tool call stands between `<tool_call>` and
`</tool_call>`, in one of two forms (`xml_calls`, `hermes_calls`).

Whole answers and streams go through the same parser, piece by piece, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

from vlm_serve.server.hermes_calls import HermesCall
from vlm_serve.server.pieces import TOOL_END, TOOL_START, CallParser, Kind, Piece, ToolForm, begun
from vlm_serve.server.xml_calls import XmlCall

THINK_START = "<think>"
THINK_END = "</think>"

_FORMS: dict[ToolForm, Callable[[int, Mapping[str, Mapping[str, Any]]], CallParser]] = {
    "qwen3_xml": XmlCall,
    "hermes": HermesCall,
}


class _State(Enum):
    REASONING = "reasoning"
    CONTENT = "content"
    TOOL = "tool"


class OutputParser:
    """Parser of one choice.

    Args:
        reasoning: the answer starts inside a `<think>` block (None: it is not split at all).
        tools: JSON schema of the parameters by function name; None leaves tool calls in the text.
        form: how calls are written.
    """

    def __init__(
        self,
        *,
        reasoning: bool | None = None,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        form: ToolForm = "qwen3_xml",
    ) -> None:
        self._tools, self._form = tools, _FORMS[form]
        self._state = _State.REASONING if reasoning else _State.CONTENT
        self._buffer = ""
        self._may_think = reasoning is False
        self._skip_space = reasoning is not None
        self._call: CallParser | None = None
        self._cut = False
        self.num_calls = 0

    @property
    def in_content(self) -> bool:
        """What comes next is content, as far as one knows."""
        return self._state is _State.CONTENT

    def feed(self, text: str) -> list[Piece]:
        """The pieces that became certain with this text."""
        self._buffer += text
        return list(self._advance(final=False))

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """The rest, once no more text can come. A call that is open stays so: its arguments are
        what the model wrote of them, as JSON that does not end.

        Args:
            cut: the answer did not end by itself, so the beginning of a marker is one, and no text.
        """
        self._cut = cut
        return list(self._advance(final=True))

    def _advance(self, *, final: bool) -> Iterator[Piece]:
        while True:
            before = (self._state, len(self._buffer))
            if self._state is _State.REASONING:
                yield from self._plain("reasoning", THINK_END, _State.CONTENT, final=final)
            elif self._state is _State.CONTENT:
                yield from self._content(final=final)
            else:
                yield from self._tool(final=final)
            if (self._state, len(self._buffer)) == before or not self._buffer:
                return

    def _content(self, *, final: bool) -> Iterator[Piece]:
        if self._may_think:
            start = self._buffer.lstrip()
            if len(start) < len(THINK_START) and THINK_START.startswith(start) and not final:
                return
            self._may_think = False
            if start.startswith(THINK_START):
                self._buffer, self._state = start[len(THINK_START) :], _State.REASONING
                return
        if self._tools is None:
            yield from self._emit("content", len(self._buffer))
        else:
            yield from self._plain("content", TOOL_START, _State.TOOL, final=final)

    def _plain(self, kind: Kind, end: str, then: _State, *, final: bool) -> Iterator[Piece]:
        """Text up to a marker; white space beside the marker belongs to neither side."""
        found = self._buffer.find(end)
        if found >= 0:
            rest = self._buffer[found + len(end) :]
            yield from self._emit(kind, len(self._buffer[:found].rstrip()))
            self._buffer, self._state, self._skip_space = rest, then, True
            return
        length = len(self._buffer)
        held = begun(self._buffer, end)
        if not final:  # hold back what may be the marker's beginning, and white space before it
            length = len(self._buffer[: length - held].rstrip())
        elif self._cut and held:
            self._buffer = self._buffer[: length - held].rstrip()
            length = len(self._buffer)
        yield from self._emit(kind, length)

    def _emit(self, kind: Kind, length: int) -> Iterator[Piece]:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if self._skip_space:
            text = text.lstrip()
        if text:
            self._skip_space = False
            yield Piece(kind, text)

    def _tool(self, *, final: bool) -> Iterator[Piece]:
        if self._call is None:
            assert self._tools is not None
            self._call = self._form(self.num_calls, self._tools)
        pieces = self._call.advance(self._buffer)
        end = self._call.end(self._buffer)
        whole = self._buffer if end < 0 else self._buffer[:end]
        self.num_calls = self._call.index + self._call.named
        yield from pieces
        if end < 0 and not final:
            return
        if self._call.named:
            yield from self._call.rest(whole) if end < 0 else self._call.close()
        elif end >= 0 or not self._cut or not self._call.may_become_call(whole):
            # It was no tool call after all.
            yield Piece("content", TOOL_START + whole + (TOOL_END if end >= 0 else ""))
        self._skip_space = bool(self._call.named)
        self._buffer = "" if end < 0 else self._buffer[end + len(TOOL_END) :]
        self._call, self._state = None, _State.CONTENT
