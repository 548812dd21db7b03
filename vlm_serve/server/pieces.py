"""Parts of an answer, and what reads a tool call in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

TOOL_START = "<tool_call>"
TOOL_END = "</tool_call>"

Kind = Literal["content", "reasoning", "tool_name", "tool_arguments"]
ToolForm = Literal["qwen3_xml", "hermes"]
"""How a model writes tool calls."""


def form_of(setting: str, template: ToolForm) -> ToolForm:
    """The form that the option `tool_call_parser` asks for; `template`: the chat template's."""
    return "qwen3_xml" if setting == "qwen3_xml" else "hermes" if setting == "hermes" else template


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the answer. `call` counts the tool calls of the answer, -1 elsewhere."""

    kind: Kind
    text: str
    call: int = -1


def begun(text: str, marker: str) -> int:
    """How many characters of the marker the text ends with, less than all of it."""
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)


class CallParser(Protocol):
    """Reads the text between the two tags of one tool call, which only ever grows.

    Attributes:
        index: which call of the answer it is.
        named: whether it is known to be a call of one of the tools.
    """

    index: int
    named: bool

    def advance(self, block: str) -> list[Piece]:
        """What became certain. The text may go on behind the call."""
        ...

    def end(self, block: str) -> int:
        """Where the closing tag begins, -1 as long as there is none."""
        ...

    def close(self) -> list[Piece]:
        """The end of a call that has ended."""
        ...

    def rest(self, block: str) -> list[Piece]:
        """What was written of a call that has no end."""
        ...

    def may_become_call(self, block: str) -> bool:
        """Whether what has no name yet may be the beginning of a call."""
        ...
