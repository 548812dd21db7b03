"""Splits an answer, while it is being generated, into reasoning, content and tool calls.

The form is Qwen3.5's: what stands before `</think>` is reasoning; a tool call is

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

Whole answers and streams go through the same parser, piece by piece, so they cannot differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from vlm_serve.server.tool_values import is_no_text, read

THINK_START = "<think>"
THINK_END = "</think>"
TOOL_START = "<tool_call>"
TOOL_END = "</tool_call>"

_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,256})>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,256})>(.*?)</parameter>", re.DOTALL)
_PARAMETER_END = "</parameter>"
_FUNCTION_END = "</function>"
_OPEN_PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})(?:>(.*))?\Z", re.DOTALL)
_NAMELESS = re.compile(r"\s*(?:<[^>]{0,265})?")

Kind = Literal["content", "reasoning", "tool_name", "tool_arguments"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the answer. `call` counts the tool calls of the answer, -1 elsewhere."""

    kind: Kind
    text: str
    call: int = -1


class _State(Enum):
    REASONING = "reasoning"
    CONTENT = "content"
    TOOL = "tool"


def _begun(text: str, marker: str) -> int:
    """How many characters of the marker the text ends with, less than all of it."""
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)


class OutputParser:
    """Parser of one choice.

    Args:
        reasoning: the answer starts inside a `<think>` block (None: it is not split at all).
        tools: JSON schema of the parameters by function name; None leaves tool calls in the text.
    """

    def __init__(
        self, *, reasoning: bool | None = None, tools: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self._tools = tools
        self._state = _State.REASONING if reasoning else _State.CONTENT
        self._buffer = ""
        self._may_think = reasoning is False
        self._skip_space = reasoning is not None
        self._call: _ToolCallParser | None = None
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
        begun = _begun(self._buffer, end)
        if not final:  # hold back what may be the marker's beginning, and white space before it
            length = len(self._buffer[: length - begun].rstrip())
        elif self._cut and begun:
            self._buffer = self._buffer[: length - begun].rstrip()
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
            self._call = _ToolCallParser(self.num_calls, self._tools)
        end = self._buffer.find(TOOL_END)
        whole = self._buffer if end < 0 else self._buffer[:end]
        pieces = self._call.advance(whole)
        self.num_calls = self._call.index + self._call.named
        yield from pieces
        if end < 0 and not final:
            return
        if self._call.named:
            yield from self._call.rest(whole) if end < 0 else self._call.close()
        elif end >= 0 or not self._cut or not _NAMELESS.fullmatch(whole):
            # It was no tool call after all.
            yield Piece("content", TOOL_START + whole + (TOOL_END if end >= 0 else ""))
        self._skip_space = bool(self._call.named)
        self._buffer = "" if end < 0 else self._buffer[end + len(TOOL_END) :]
        self._call, self._state = None, _State.CONTENT


class _ToolCallParser:
    """One `<tool_call>` block; emits the name, then the arguments one parameter at a time."""

    def __init__(self, index: int, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.index = index
        self.named = False
        self._tools = tools
        self._schema: Mapping[str, Any] = {}
        self._position = 0
        self._keys: set[str] = set()

    def advance(self, block: str) -> list[Piece]:
        """What is new in the block, which only ever grows."""
        pieces = []
        if not self.named:
            found = _FUNCTION.match(block)
            if found is None or found.group(1).strip() not in self._tools:
                return []
            self.named = True
            self._schema = self._tools[found.group(1).strip()]
            self._position = found.end()
            pieces.append(Piece("tool_name", found.group(1).strip(), self.index))
        # Looked for first: the pattern would read a long value again with every token of it.
        while block.find(_PARAMETER_END, self._position) >= 0:
            found = _PARAMETER.match(block, self._position)
            if found is None:
                break
            self._position = found.end()
            key = found.group(1).strip()
            if key in self._keys:
                continue
            opening = ", " if self._keys else "{"
            self._keys.add(key)
            value = read(found.group(2), self._parameter(key), self._schema)
            text = f"{opening}{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
            pieces.append(Piece("tool_arguments", text, self.index))
        return pieces

    def _parameter(self, key: str) -> Any:
        properties = self._schema.get("properties")
        return properties.get(key) if isinstance(properties, Mapping) else None

    def close(self) -> list[Piece]:
        return [Piece("tool_arguments", "}" if self._keys else "{}", self.index)]

    def rest(self, block: str) -> list[Piece]:
        """The end of a block that has none."""
        rest = block[self._position :].lstrip()
        if rest.startswith(_FUNCTION_END):
            return self.close()
        opening = ", " if self._keys else "{"
        found = _OPEN_PARAMETER.match(rest)
        if found is None or found.group(1).strip() in self._keys:
            return [] if self._keys else self._said("{")
        key, value = found.group(1).strip(), found.group(2)
        if value is None:
            return self._said(opening + json.dumps(key, ensure_ascii=False)[:-1])
        value = value.removeprefix("\n")
        value = value[: len(value) - _begun(value, "\n" + _PARAMETER_END)]
        value = value[: len(value) - _begun(value, _PARAMETER_END)]
        text = json.dumps(value, ensure_ascii=False)[:-1]
        if is_no_text(self._parameter(key), self._schema):
            text = value.strip()
        return self._said(f"{opening}{json.dumps(key)}: {text}")

    def _said(self, text: str) -> list[Piece]:
        return [Piece("tool_arguments", text, self.index)]
