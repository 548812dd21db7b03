"""The short form of a question in Python: a text with its media, in place of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_serve.errors import InvalidRequestError

Messages = Sequence[Mapping[str, Any]]
ShortForm = str | tuple[str, Any]


def messages_of(inputs: ShortForm) -> Messages:
    """Return the conversation of a text, (text, media) or (text, [media, ...]).

    Raises InvalidRequestError for anything else.
    """
    pair: Any = (inputs, []) if isinstance(inputs, str) else inputs
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
        raise InvalidRequestError("the short form is text, (text, media) or (text, [media, ...])")
    text, media = pair
    items = list(media) if isinstance(media, list | tuple) else [media]
    parts = [_media_part(item) for item in items]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


_VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts", ".m2ts", ".mpg", ".mpeg", ".3gp"),
    *(".flv", ".wmv"),
)


def _media_part(item: Any) -> dict[str, Any]:
    """Return the part for a medium; arrays of four axes, and video names or bytes, are videos."""
    if getattr(item, "ndim", 0) == 4 or _looks_like_video(item):
        return {"type": "video", "video": item}
    return {"type": "image", "image": item}


def _looks_like_video(item: Any) -> bool:
    if isinstance(item, bytes):
        # ISO media ("ftyp", but not its still-image brands), Matroska / WebM, RIFF AVI.
        is_iso = item[4:8] == b"ftyp" and item[8:12] not in (b"avif", b"heic", b"heix", b"mif1")
        return is_iso or item[:4] == b"\x1aE\xdf\xa3" or item[8:12] == b"AVI "
    if isinstance(item, str | Path):
        name = str(item)
        if name.startswith("data:"):
            return name.startswith("data:video/")
        return name.lower().split("?", 1)[0].endswith(_VIDEO_SUFFIXES)
    return False
