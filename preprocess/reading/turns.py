"""Puts messages where a chat template can render them.

Results of tool calls stand in the order of the calls. Clients send those of parallel calls as these
finish. Most templates show no ids, so a model takes the first result for that of the first call.

System messages stand at the start. Most templates take one, there. Agents send several at the
start, and later ones for results of tools and for reminders.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from operator import itemgetter
from typing import Any

from vlm_serve.preprocess.reading.conversation import Conversation, Turn, text_part

_Message = dict[str, Any]
_Label = tuple[str | None, str | None]
"""The id of a call and the name of its function; None: not given."""
_KEYS: tuple[Callable[[_Label], str | None], ...] = (itemgetter(0), itemgetter(1), lambda _: "")


def order_results(conversation: Conversation) -> None:
    """Put the results behind each answer into the order of its calls, with their media.

    Texts between them keep their places. No result moves past a message with media, which may
    belong to the result before it. A result is that of a call in the answer before it, because some
    clients count the ids of each answer anew. A result whose id is unknown there is named in
    `ignored`; one without an id gets the id of its call.
    """
    turns, places = conversation.turns(), iter(conversation.result_places)
    # A message that the model continues must stay the last one.
    end = len(turns) - conversation.continue_final_message
    for calls, indices in _groups([message for message, _ in turns[:end]]):
        results = [turns[index][0] for index in indices]
        labels = [_label(call.get("id"), call.get("function", call)) for call in calls]
        call_of = _match(labels, [_label(result.get("tool_call_id"), result) for result in results])
        for at, result in enumerate(results):
            place, given = next(places), result.get("tool_call_id")
            expected = calls[call_of[at]].get("id") if at in call_of else None
            if given is None and expected is not None:
                result["tool_call_id"] = expected
            elif given is not None and (expected is None or str(expected) != str(given)):
                conversation.ignored.append(place)
        for run in _runs(indices, turns):
            order = sorted(run, key=lambda at: call_of.get(at, len(calls)))
            moved = [turns[indices[at]] for at in order]
            for at, turn in zip(run, moved, strict=True):
                turns[indices[at]] = turn
    conversation.messages = [message for message, _ in turns]
    conversation.media = [medium for _, media in turns for medium in media]


def _groups(messages: Sequence[_Message]) -> Iterator[tuple[list[_Message], list[int]]]:
    """Yield the calls of each answer and the indices of the results before the next one.

    Answers side by side are one, since some clients send a message for each call.
    """
    calls, indices, role = list[_Message](), list[int](), ""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            if role != "assistant":
                yield calls, indices
                calls, indices = [], []
            calls += message.get("tool_calls") or ()
        elif message["role"] == "tool":
            indices.append(index)
        role = message["role"]
    yield calls, indices


def _runs(indices: Sequence[int], turns: Sequence[Turn]) -> list[list[int]]:
    """Divide the results of a group, by their numbers, where messages with media stand between."""
    runs = [[0]] if indices else []
    for at, (before, index) in enumerate(pairwise(indices), start=1):
        if any(media for _, media in turns[before + 1 : index]):
            runs.append([])
        runs[-1].append(at)
    return runs


def _label(call_id: Any, function: _Message) -> _Label:
    name = function.get("name")
    return None if call_id is None else str(call_id), None if name is None else str(name)


def _match(calls: Sequence[_Label], results: Sequence[_Label]) -> dict[int, int]:
    """Return the index of the call of each result that has one.

    A result goes by its id. Without a known id it goes by the name of its function, and else it is
    that of the first call left. A second result for an id has no call.
    """
    known = {call_id for call_id, _ in calls if call_id is not None}
    call_of: dict[int, int] = {}
    left: Sequence[int] = range(len(results))
    for key_of in _KEYS:
        taken, waiting = set(call_of.values()), defaultdict[str | None, deque[int]](deque)
        for index, call in enumerate(calls):
            if index not in taken:
                waiting[key_of(call)].append(index)
        for at in left:
            key = key_of(results[at])
            if key is not None and waiting[key]:
                call_of[at] = waiting[key].popleft()
        left = [at for at in left if at not in call_of and results[at][0] not in known]
    return call_of


_BLANK_LINE = "\n\n"


def join_leading(conversation: Conversation) -> None:
    """Join the system messages at the start into one, with empty lines between them."""
    leading = list(takewhile(_is_system, conversation.messages))
    if len(leading) > 1:
        conversation.messages[: len(leading)] = [_joined(leading)]
        del conversation.system_places[1 : len(leading)]


def fit_systems(conversation: Conversation, *, anywhere: bool) -> Conversation:
    """Return the conversation with system messages only at the start, as most templates demand.

    A later one becomes a user's turn if it follows an answer or is the last word before one. By
    this rule a longer conversation keeps its beginning. Any other is joined to the first one. Both
    are named in `ignored`.

    Args:
        anywhere: the template renders later ones where they stand, so nothing changes.
    """
    messages, places = conversation.messages, conversation.system_places
    start = 1 if messages and _is_system(messages[0]) else 0
    if anywhere or not any(map(_is_system, messages[start:])):
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


def _neighbours(roles: Sequence[str], role_before: str = "") -> list[str]:
    """Return the last role before each message that is not a system message's."""
    before = []
    for role in roles:
        before.append(role_before)
        role_before = role or role_before
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
