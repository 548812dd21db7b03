"""Pieces of a parsed answer, and how a model writes them: the forms of tool calls and reasoning.

The rules for both are the same for HTTP and Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from vlm_serve.engine.requests.thought import Thought
from vlm_serve.preprocess.text.family import THINK_END as THINK_END
from vlm_serve.preprocess.text.family import THINK_START as THINK_START
from vlm_serve.preprocess.text.family import begins_in_thought
from vlm_serve.preprocess.text.template import TemplateTraits

TOOL_START = "<tool_call>"
TOOL_END = "</tool_call>"

Kind = Literal["content", "reasoning", "tool_name", "tool_arguments"]
ToolForm = Literal["qwen3_xml", "minicpm5", "hermes"]
"""How a model writes tool calls."""

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters by function name."""

ReasoningParser = Literal["none", "qwen3", "deepseek_r1"]


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
class ParsedCall:
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
    calls: Sequence[ParsedCall] = ()
    begun: bool = False


def reasoning_form(setting: str, traits: TemplateTraits) -> ReasoningParser:
    """Return how reasoning is split off with a setting of `--reasoning-parser`."""
    if setting == "auto":
        return "qwen3" if traits.thinking.marked else "none"
    return cast(ReasoningParser, setting)


def thought_behind(
    prompt: str, form: ReasoningParser, *, continued: bool = False, calls: bool = False
) -> Thought | None:
    """Return how the answer to a prompt may think; None if its reasoning is not split off.

    Args:
        prompt: the prompt's text.
        continued: the answer continues the prompt's last message.
        calls: a tool call in the thought ends it.
    """
    if form == "none":
        return None
    opened = begins_in_thought(prompt, continued=continued)
    if form == "deepseek_r1" and not continued:
        opened = not prompt.rstrip().endswith(THINK_END)
    return Thought(opened, calls=calls)
