"""Parts of an answer, and what reads the tool calls in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

TOOL_START = "<tool_call>"
TOOL_END = "</tool_call>"
THINK_START = "<think>"
THINK_END = "</think>"

Kind = Literal["content", "reasoning", "tool_name", "tool_arguments"]
ToolForm = Literal["qwen3_xml", "hermes"]
"""How a model writes tool calls."""

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters by function name."""


def form_of(setting: str, template: ToolForm) -> ToolForm:
    """The form that the option `tool_call_parser` asks for; `template`: the chat template's."""
    return "qwen3_xml" if setting == "qwen3_xml" else "hermes" if setting == "hermes" else template


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the answer. `call` counts the tool calls of the answer, -1 elsewhere."""

    kind: Kind
    text: str
    call: int = -1


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as it was read.

    Attributes:
        arguments: JSON; of a call that the limit has cut, JSON that does not end.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What a `CallReader` has found at the start of its text.

    Attributes:
        size: characters that this is about; what follows has not been read.
        calls: what they say; none: they are plain text.
        begun: they are the first words of a call that the limit has cut: neither call nor text.
    """

    size: int
    calls: Sequence[Call] = ()
    begun: bool = False


class CallReader(Protocol):
    """Reads a text that begins like a tool call, as it comes.

    What it finds depends on the text alone, not on how it was cut. Every character is looked at a
    bounded number of times.
    """

    @property
    def text(self) -> str:
        """Everything that has been fed."""
        ...

    def feed(self, text: str) -> Reading | None:
        """Take the text that comes next; None: more is needed to tell what it is."""
        ...

    def end(self, *, cut: bool) -> Reading:
        """Tell what the text is that nothing follows.

        Args:
            cut: the limit has ended it, so what is open might have gone on.
        """
        ...


class CallForm(Protocol):
    """One way to write tool calls, in one answer.

    Attributes:
        openings: texts with which a call may begin.
    """

    openings: tuple[str, ...]

    def reader(self, *, thought: bool) -> CallReader:
        """Make a reader for a text that begins with one of the openings.

        Args:
            thought: it stands in a thought, which `</think>` may end at any place.
        """
        ...


def begun(text: str, *markers: str) -> int:
    """How many characters of one of the markers the text ends with, less than all of it."""
    most = min(max(map(len, markers), default=1) - 1, len(text))
    starts = (text[len(text) - size :] for size in range(most, 0, -1))
    return next((len(start) for start in starts for each in markers if each.startswith(start)), 0)
