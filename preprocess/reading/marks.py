"""Takes other vendors' cache marks out of a request's conversation.

Their clients mark a part, a message or a tool up to which a server should cache. Here every place
is cached anyway, and a mark in a template's input would change the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlm_serve.preprocess.reading.values import MAX_DEPTH

_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
_LISTS = frozenset({"content", "output", "summary", "tool_calls"})
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


def without_marks(value: Any, where: str, named: list[str], depth: int = MAX_DEPTH) -> Any:
    """Return messages, items, blocks or tools without cache marks. The argument stays as it is.

    Fields with free content, such as arguments and schemas, are not searched.

    Args:
        value: a list of objects, or anything else, which is returned.
        where: its place in the request.
        named: gets the places of the marks.
        depth: so many levels are searched.
    """
    if isinstance(value, list | tuple):
        return [
            without_marks(each, f"{where}[{at}]", named, depth) for at, each in enumerate(value)
        ]
    if not isinstance(value, Mapping) or not depth:
        return value
    kept = {}
    for key, inside in value.items():
        if key in _MARKS:
            named += [f"{where}.{key}"] if inside is not None else ()
        elif key in _LISTS or (key in _OBJECTS and isinstance(inside, Mapping)):
            kept[key] = without_marks(inside, f"{where}.{key}", named, depth - 1)
        else:
            kept[key] = inside
    return kept
