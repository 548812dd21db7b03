"""The marks around a thought, and whether a prompt leaves one open."""

from __future__ import annotations

THINK_START = "<think>"
THINK_END = "</think>"
TOOL_START = "<tool_call>"
_TURN = "<|im_start|>"


def begins_in_thought(prompt: str, *, continued: bool) -> bool:
    """Return True if the answer to a prompt with this text begins inside a `<think>` block.

    Args:
        continued: the answer continues the last message, whose thought may be open. A thought
            begins where the message or its text does; elsewhere `<think>` is a word of the text.
    """
    if not continued:
        return prompt.rstrip().endswith(THINK_START)
    turn = prompt.rfind(_TURN)
    if turn < 0:
        return prompt.rfind(THINK_START) > prompt.rfind(THINK_END)
    text = prompt[turn:].partition("\n")[2].rpartition(THINK_END)[2]
    return text.lstrip().startswith(THINK_START)


def leaves_thought_open(text: str) -> bool:
    """Return True if a prompt of unknown origin ends inside a thought.

    Outside of a chat template's turn, only `<think>` at the very end opens one.
    """
    return begins_in_thought(text, continued=_TURN in text)
