"""`truncation: "auto"`: drop the oldest turns of a conversation longer than the context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vlm_serve.errors import ContextLengthError
from vlm_serve.preprocess.prompt import Prompt
from vlm_serve.preprocess.reading.conversation import Conversation


def prepare_truncated(
    conversation: Conversation, prepare: Callable[[Conversation], Prompt], max_tokens: int
) -> Prompt:
    """Return the conversation's prompt, without its oldest turns if it is too long.

    A turn begins with a user's message and ends before the next one. System messages at the
    beginning stay.

    Turns are dropped in steps that grow with the conversation. The kept part then begins at the
    same turn for several requests, so the cache has its prefix.

    Args:
        max_tokens: maximum number of the prompt's tokens.

    Raises:
        ContextLengthError: even the last turn does not fit. `prepare` may raise other errors.
    """

    def fitting_prompt(dropped: int) -> Prompt | None:
        try:
            prompt = prepare(drop_turns(conversation, starts, dropped))
        except ContextLengthError:
            return None
        return prompt if len(prompt) <= max_tokens else None

    starts = turn_starts(conversation)
    last = max(len(starts) - 1, 0)
    whole = fitting_prompt(0)
    if whole is not None:
        return whole
    low, high = 0, last  # Dropping `low` turns is too few; `high` is the most.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fitting_prompt(middle) is not None else (middle, high)
    step = 1 << max((last + 1 - high) // 4, 1).bit_length() - 1
    dropped = min(-(-high // step) * step, last)
    return prepare(drop_turns(conversation, starts, dropped))


def turn_starts(conversation: Conversation) -> list[int]:
    """Return the index of each turn's first message; initial system messages belong to no turn."""
    starts = []
    for index, message in enumerate(conversation.messages):
        before = conversation.messages[index - 1]["role"] if index else "system"
        if message["role"] == "user" and before != "user":
            starts.append(index)
    return starts


def drop_turns(conversation: Conversation, starts: list[int], dropped: int) -> Conversation:
    """Return the conversation without its first `dropped` turns and their media."""
    if not dropped:
        return conversation
    turns = conversation.turns()
    kept = turns[: starts[0]] + turns[starts[dropped] :]
    return replace(
        conversation,
        messages=[message for message, _ in kept],
        media=[medium for _, media in kept for medium in media],
    )
