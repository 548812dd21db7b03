"""Media of `vlm-serve chat`: named by flags, by commands, or dragged into a line."""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from vlm_serve.errors import ConfigError, VlmServeError

Part = dict[str, Any]
_WORD = re.compile(r"'[^']+'|\"[^\"]+\"|(?:\\.|[^\s\\])+")
"""A word as a shell reads it, and as terminals write the path of a dragged file."""
_PLACE = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]")


def part_of(kind: str, source: str, sign: str = "--") -> Part:
    """Return the part of a message for a file or a URL: the command may read any local file.

    Raises ConfigError for an unreadable file, which begins with `sign` and the kind.
    """
    if "://" in source or source.startswith("data:"):
        return {"type": kind, kind: source}
    path = Path(source).expanduser()
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{sign}{kind} {source}: {error.strerror}", param=kind) from None
    return {"type": kind, kind: path}


def dragged(line: str) -> tuple[str, list[Part]]:
    """Take the pictures and videos out of a line that names them by their paths.

    Returns:
        The rest of the line, and parts in the order of their names. A word is a medium if a file of
        this name exists and its suffix is that of a picture or a video.
    """
    parts, rest, end = [], "", 0
    for word in _WORD.finditer(line):
        path = _path(word.group())
        kind = (mimetypes.guess_type(path.name)[0] or "").split("/")[0]
        if kind in ("image", "video") and path.is_file():
            rest += line[end : word.start()]
            end = word.end()
            parts.append(part_of(kind, str(path)))
    return (rest + line[end:]).strip(), parts


def _path(word: str) -> Path:
    quoted = word[0] in "'\""
    word = word[1:-1] if quoted else re.sub(r"\\(.)", r"\1", word)
    if word.startswith("file://"):
        word = unquote(urlsplit(word).path)
    try:
        return Path(word).expanduser()
    except RuntimeError:  # ~nobody
        return Path(word)


def named(error: VlmServeError, messages: Sequence[dict[str, Any]]) -> VlmServeError:
    """Return an error about a medium behind the medium's name; any other error as it is."""
    place = _PLACE.match(error.param or "")
    if place is None:
        return error
    part = messages[int(place[1])]["content"][int(place[2])]
    source = part if isinstance(part, str) else part.get(part["type"])
    same = type(error)(f"{str(source)[:100]}: {error.message}", param=error.param, code=error.code)
    return same if isinstance(source, str | Path) else error
