"""Pieces of a parsed answer, and the results of reading tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vlm_serve.preprocess.text.family import THINK_END as THINK_END
from vlm_serve.preprocess.text.family import THINK_START as THINK_START

TOOL_START = "<tool_call>"
TOOL_END = "</tool_call>"

Kind = Literal["content", "reasoning", "tool_name", "tool_arguments"]
ToolForm = Literal["qwen3_xml", "minicpm5", "hermes"]
"""How a model writes tool calls."""

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters by function name."""


def form_of(setting: str, template: ToolForm) -> ToolForm:
    """Return the form of tool calls.

    Args:
        setting: the option `tool_call_parser`; "auto" chooses the template's form.
        template: the form in the chat template.
    """
    return next((form for form in get_args(ToolForm) if form == setting), template)


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
        arguments: JSON; if the call is not whole, a prefix of JSON.
        whole: the call is complete.
    """

    name: str
    arguments: str
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of a `CallReader`, for the start of its text.

    Attributes:
        size: number of characters read; the rest is unread.
        calls: their calls; none: they are plain text.
        begun: they begin a call that the token limit cut before its name: neither call nor text.
    """

    size: int
    calls: Sequence[Call] = ()
    begun: bool = False


def begun(text: str, *markers: str) -> int:
    """Return the length of the longest proper prefix of a marker at the end of the text."""
    most = min(max(map(len, markers), default=1) - 1, len(text))
    starts = (text[len(text) - size :] for size in range(most, 0, -1))
    return next((len(start) for start in starts for each in markers if each.startswith(start)), 0)
