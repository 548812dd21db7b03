"""How the reasoning of answers is split off: one rule for HTTP and Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

from vlm_serve.engine.thought import Thought
from vlm_serve.preprocess.text.family import THINK_END, begins_in_thought, leaves_thought_open
from vlm_serve.preprocess.text.template import TemplateTraits

ReasoningParser = Literal["none", "qwen3", "deepseek_r1"]


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


def before_grammar(
    thought: Thought | None, form: ReasoningParser, prompt: Callable[[], str]
) -> bytes:
    """Return the text behind which a grammar applies; b"": it applies from the answer's start.

    Args:
        thought: of the answer; None: its reasoning is not split off.
        form: how reasoning is split off behind a chat template.
        prompt: returns the prompt's text, for a prompt of unknown origin.
    """
    if thought is not None:
        opened = thought.opened
    else:
        opened = form != "none" and leaves_thought_open(prompt())
    return THINK_END.encode() if opened else b""
