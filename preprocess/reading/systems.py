"""Puts system messages where a chat template can render them.

Most templates take one system message, at the start. Agents send several at the start, and later
ones for results of tools and for reminders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from vlm_serve.preprocess.reading.conversation import Conversation, Turn
from vlm_serve.preprocess.reading.parts import text_part

_Message = dict[str, Any]
_BLANK_LINE = "\n\n"


def join_leading(conversation: Conversation) -> None:
    """Join the system messages at the start into one, with empty lines between them."""
    leading = list(takewhile(_is_system, conversation.messages))
    if len(leading) > 1:
        conversation.messages[: len(leading)] = [_joined(leading)]
        del conversation.system_places[1 : len(leading)]


def fit_systems(conversation: Conversation, *, late: bool) -> Conversation:
    """Return the conversation with system messages only at the start, as most templates demand.

    A later one becomes a user's turn if it follows an answer or is the last word before one. By
    this rule a longer conversation keeps its beginning. Any other is joined to the first one. Both
    are named in `ignored`.

    Args:
        late: the template renders later ones where they stand, so nothing changes.
    """
    messages, places = conversation.messages, conversation.system_places
    start = 1 if messages and _is_system(messages[0]) else 0
    if late or not any(map(_is_system, messages[start:])):
        return conversation
    turns = conversation.turns()
    first, rest = turns[:start], list[Turn]()
    for (message, media), stays in zip(turns[start:], _staying(messages[start:]), strict=True):
        if not _is_system(message):
            rest.append((message, media))
        elif stays:
            rest.append((message | {"role": "user"}, media))
        else:
            first.append((message, media))
    joined = [_joined([message for message, _ in first])] if first else []
    return replace(
        conversation,
        messages=[*joined, *(message for message, _ in rest)],
        media=[medium for _, media in first + rest for medium in media],
        system_places=places[: len(joined)],
        ignored=[*conversation.ignored, *places[start:]],
    )


def _is_system(message: _Message) -> bool:
    return bool(message["role"] == "system")


def _staying(messages: Sequence[_Message]) -> list[bool]:
    """Return for each message whether it stays in its place if it is a system message."""
    roles = ["" if _is_system(message) else message["role"] for message in messages]
    before, after = _neighbours(roles), _neighbours(roles[::-1], "assistant")[::-1]
    return [
        one in ("assistant", "tool") or (one != "" and two == "assistant")
        for one, two in zip(before, after, strict=True)
    ]


def _neighbours(roles: Sequence[str], found: str = "") -> list[str]:
    """Return the last role before each message that is not a system message's."""
    before = []
    for role in roles:
        before.append(found)
        found = role or found
    return before


def _joined(messages: Sequence[_Message]) -> _Message:
    """Return a message with the contents of all."""
    contents = [message["content"] for message in messages if message.get("content")]
    if all(isinstance(content, str) for content in contents):
        return messages[0] | {"content": _BLANK_LINE.join(contents)}
    runs: list[list[str] | dict[str, Any]] = []
    for content in contents:
        parts = [text_part(content)] if isinstance(content, str) else content
        for at, part in enumerate(parts):
            text, end = part.get("text"), runs[-1] if runs else None
            if at == 0 and isinstance(end, list) and text is not None:
                end.append(text)
                continue
            if at == 0 and end is not None:
                runs.append([_BLANK_LINE])
            runs.append(part if text is None else [text])
    joined = [text_part(_BLANK_LINE.join(run)) if isinstance(run, list) else run for run in runs]
    return messages[0] | {"content": joined}
