"""Wishes of clients for the cache, read once for all APIs: marks with their lifetimes, and a mode.

Clients mark a part, a message or a tool up to which a server should cache: with `cache_control`
(Anthropic's clients) or `prompt_cache_breakpoint` (OpenAI's). A mark in a template's input would
change the prompt. So a conversation is read without marks, and a second time with a text of no
meaning in the place of each. Where the two renderings part, the mark stands.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.conversation import AskedMark, CacheWishes, Conversation
from vlm_serve.preprocess.reading.values import MAX_DEPTH, object_of, short_repr

MOST_MARKS = 4
"""Marks of a request that count, the latest ones; earlier ones have been written by then."""
CONTROL, BREAKPOINT = "cache_control", "prompt_cache_breakpoint"
_SECONDS = {
    CONTROL: {None: 300.0, "5m": 300.0, "1h": 3600.0},
    BREAKPOINT: {None: 1800.0, "30m": 1800.0, "12h": 43200.0},
}
_LISTS = frozenset({"content", "instructions", "output", "summary", "tool_calls"})
_OBJECTS = frozenset(
    {
        "file",
        "function",
        "image",
        "image_url",
        "input_image",
        "input_video",
        "source",
        "url",
        "video",
        "video_url",
    }
)
_IN_A_LIST = re.compile(r"(?:content|output|system|^tools)\[\d+\]$")
"""Places of parts, and of tools, behind which there may be another one."""
_BEGIN, _END = "\U00100000", "\U00100001"
Sign = Callable[[str, str, Any], str]
"""Takes a mark's place, its field and its value; returns the text in its place, "" for none."""


def read_wishes(
    api: str,
    body: Mapping[str, Any],
    fields: Mapping[str, Any],
    read: Callable[[Mapping[str, Any]], Conversation],
    ignored: list[str],
) -> tuple[CacheWishes, dict[str, Any]]:
    """Read the marks and options of a body; return them, and the fields without marks.

    Args:
        api: as for `read_conversation`.
        fields: the body's fields that may hold marks, in the order of the prompt; a prediction is
            none of it.
        read: reads a body.
        ignored: gets the places of marks without effect.

    Raises InvalidRequestError, naming the field at fault.
    """
    options = object_of(body.get("prompt_cache_options") or {}, "prompt_cache_options")
    where, mode = "prompt_cache_options", options.get("mode")
    if mode not in (None, "implicit", "explicit"):
        raise InvalidRequestError(
            f"{where}.mode must be implicit or explicit, not {short_repr(mode)}",
            param=f"{where}.mode",
        )
    lifetime = options.get("ttl")
    wishes = CacheWishes()
    if lifetime is not None:
        wishes.seconds = _seconds(BREAKPOINT, lifetime, f"{where}.ttl")
    nonce = secrets.token_hex(8)

    def sign(place: str, name: str, value: Any) -> str:
        mark = object_of(value, place)
        ttl = mark.get("ttl")
        if ttl is None and name == BREAKPOINT:
            ttl = lifetime
        seconds = _seconds(name, ttl, f"{place}.ttl")
        text = f"{_BEGIN}{nonce}{len(wishes.marks)}{_END}"
        wishes.marks.append(AskedMark(text, seconds, ttl, place))
        return text

    prediction = {"prediction"} & fields.keys()
    beside = {name: unmarked(fields[name], name, ignored) for name in prediction}
    prompt = {name: value for name, value in fields.items() if name not in prediction}
    marked = {name: with_signs(value, name, sign) for name, value in prompt.items()}
    plain = marked  # of most requests, whose fields are walked through once
    if wishes.marks:
        plain = {name: without_marks(value, name) for name, value in prompt.items()}
    # A mark of the whole request stands at the end of its last message.
    whole = body.get(CONTROL) if api == "messages" else None
    said = marked.get("messages")
    if whole is not None and isinstance(said, list) and said and isinstance(said[-1], dict):
        last = _signed(said[-1], sign(CONTROL, CONTROL, whole))[0]
        marked = marked | {"messages": [*said[:-1], last]}
    if wishes.marks:
        conversation = read({**body, **marked})
        wishes.signs = re.compile(f"{_BEGIN}{nonce}[0-9]+{_END}")
        texts = [*strings_of(conversation.messages), *strings_of(conversation.tools)]
        # There may be as many marks as texts: each text is read once, whatever their number.
        seen = {sign for text in texts for sign in wishes.signs.findall(text)}
        counting = [mark for mark in wishes.marks if mark.sign in seen][-MOST_MARKS:]
        ignored += [mark.place for mark in wishes.marks if mark not in counting]
        wishes.marks = counting
        wishes.marked = conversation if counting else None
    wishes.uncached = mode == "explicit" and not wishes.marks
    return wishes, plain | beside


def strings_of(value: Any) -> Iterator[str]:
    """Yield every text in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from strings_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_of(item)


def _seconds(name: str, ttl: Any, where: str) -> float:
    known = _SECONDS[name]
    if ttl is not None and (not isinstance(ttl, str) or ttl not in known):
        names = " or ".join(str(each) for each in known if each is not None)
        raise InvalidRequestError(f"{where} must be {names}, not {short_repr(ttl)}", param=where)
    return known[ttl]


def without_marks(value: Any, where: str, depth: int = MAX_DEPTH) -> Any:
    """Return messages, items, blocks or tools without cache marks. The argument stays as it is.

    Fields with free content, such as arguments and schemas, are not searched.
    """
    return with_signs(value, where, lambda place, name, value: "", depth)


def unmarked(value: Any, where: str, ignored: list[str]) -> Any:
    """Return what `without_marks` returns, and name the places of the marks."""

    def unread(place: str, name: str, value: Any) -> str:
        ignored.append(place)
        return ""

    return with_signs(value, where, unread)


def with_signs(value: Any, where: str, sign: Sign, depth: int = MAX_DEPTH) -> Any:
    """Return messages, items, blocks or tools with texts in the places of cache marks.

    Args:
        value: a list of objects, or anything else, which is returned.
        where: its place in the request.
        sign: what stands for a mark.
        depth: so many levels are searched.
    """
    if isinstance(value, list | tuple):
        out: list[Any] = []
        for at, entry in enumerate(value):
            kept, behind = _entry(entry, f"{where}[{at}]", sign, depth)
            out += [kept, *behind]
        return out
    return _entry(value, where, sign, depth)[0]


def _entry(value: Any, where: str, sign: Sign, depth: int) -> tuple[Any, list[Any]]:
    """Return an entry with its signs, and what stands behind it in its list."""
    if not isinstance(value, Mapping) or not depth:
        return value, []
    kept: dict[str, Any] = {}
    marks = []
    for key, inside in value.items():
        if key in (CONTROL, BREAKPOINT):
            marks += [(key, inside)] if inside is not None else []
        elif key in _LISTS or (key in _OBJECTS and isinstance(inside, Mapping)):
            kept[key] = with_signs(inside, f"{where}.{key}", sign, depth - 1)
        else:
            kept[key] = inside
    behind: list[Any] = []
    for name, mark in marks:
        if text := sign(f"{where}.{name}", name, mark):
            kept, more = _signed(kept, text, tool=where.startswith("tools["))
            behind += more if _IN_A_LIST.search(where) else ()
    return kept, behind


def _signed(kept: dict[str, Any], text: str, *, tool: bool = False) -> tuple[Any, list[Any]]:
    """Return a marked object with a text at its end, or with something behind it."""
    if tool:
        function = kept.get("function")
        if isinstance(function, Mapping):
            return kept, [kept | {"function": {**function, "name": text}}]
        return kept, [kept | {"name": text}]
    for name in ("text", "content", "output"):
        if isinstance(kept.get(name), str):
            return kept | {name: kept[name] + text}, []
    part = {"type": "text", "text": text}
    if kept.get("type") in (None, "message", "tool_result", "function_call_output"):
        for name in ("content", "output"):
            if isinstance(kept.get(name), list):
                return kept | {name: [*kept[name], part]}, []
        return kept, []
    return kept, [part]
