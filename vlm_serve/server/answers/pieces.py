"""Pieces of a parsed answer, and the interface of tool call readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from vlm_serve.preprocess.thoughts import THINK_END as THINK_END
from vlm_serve.preprocess.thoughts import THINK_START as THINK_START

TOOL_START = "<tool_call>"
TOOL_END = "</tool_call>"

Kind = Literal["content", "reasoning", "tool_name", "tool_arguments"]
ToolForm = Literal["qwen3_xml", "hermes"]
"""How a model writes tool calls."""

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters by function name."""


def form_of(setting: str, template: ToolForm) -> ToolForm:
    """Return the form of tool calls.

    Args:
        setting: the option `tool_call_parser`; "auto" chooses the template's form.
        template: the form in the chat template.
    """
    return "qwen3_xml" if setting == "qwen3_xml" else "hermes" if setting == "hermes" else template


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the answer.

    Attributes:
        call: index of the tool call; -1: the piece belongs to none.
    """

    kind: Kind
    text: str
    call: int = -1


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed tool call.

    Attributes:
        arguments: JSON; if the token limit cut the call, a prefix of JSON.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of a `CallReader` for the start of its text.

    Attributes:
        size: number of characters read; the rest is unread.
        calls: their calls; none: they are plain text.
        begun: they begin a call that the token limit cut before its name: neither call nor text.
    """

    size: int
    calls: Sequence[Call] = ()
    begun: bool = False


class CallReader(Protocol):
    """Reads streamed text that begins like a tool call.

    The result depends on the text alone, not on how it was split. Every character is read a bounded
    number of times.
    """

    @property
    def text(self) -> str:
        """All text fed so far."""
        ...

    def feed(self, text: str) -> Reading | None:
        """Read the next text; return None if more is needed for a decision."""
        ...

    def end(self, *, cut: bool) -> Reading:
        """Return the result at the end of the text.

        Args:
            cut: the token limit ended it, so an open call may be incomplete.
        """
        ...


class CallForm(Protocol):
    """A form of tool calls, for one answer.

    Attributes:
        openings: texts that may begin a call.
    """

    openings: tuple[str, ...]

    def reader(self, *, thought: bool) -> CallReader:
        """Make a reader for a text that begins with one of the openings.

        Args:
            thought: the text is inside a thought, which `</think>` may end anywhere.
        """
        ...


def begun(text: str, *markers: str) -> int:
    """Return the length of the longest proper prefix of a marker at the end of the text."""
    most = min(max(map(len, markers), default=1) - 1, len(text))
    starts = (text[len(text) - size :] for size in range(most, 0, -1))
    return next((len(start) for start in starts for each in markers if each.startswith(start)), 0)
