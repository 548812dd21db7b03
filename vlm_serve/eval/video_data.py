"""Reader of questions about videos with their right answers: a CSV file or JSON lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_serve.batch.rows import SUFFIXES, read_rows
from vlm_serve.errors import ConfigError

SEPARATOR = "|"
"""Separates the choices in a CSV file."""


@dataclass(frozen=True, slots=True)
class VideoItem:
    """One question about one video.

    Attributes:
        id: from the file, or made from the line.
        video: path of the video.
        question: its text.
        answer: the right answer: a text, or with choices one of them or its letter.
        choices: at most 26; empty: the answer is free text.
    """

    id: str
    video: Path
    question: str
    answer: str
    choices: tuple[str, ...] = ()


def read_videos(path: Path, limit: int | None = None) -> list[VideoItem]:
    """Return the questions in the file's order, at most `limit`. Paths are relative to the file.

    Raises ConfigError that names the file and the line at fault, such as a missing column or video.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError("data must be a .csv or a .jsonl file", param="data")
    found: dict[str, VideoItem] = {}
    for number, row in read_rows(path, "data"):
        if limit is not None and len(found) == limit:
            break
        place = f"{path}, line {number}"
        item = _item(path, row, number, place)
        if found.setdefault(item.id, item) is not item:
            raise ConfigError(f"{place}: the id {item.id!r} appears twice", param="data")
    if not found:
        raise ConfigError(f"{path}: there are no questions", param="data")
    return list(found.values())


def _item(path: Path, row: dict[str, Any], number: int, place: str) -> VideoItem:
    texts = [row.get(name) for name in ("video", "question", "answer")]
    missing = [
        name
        for name, value in zip(("video", "question", "answer"), texts, strict=True)
        if not isinstance(value, str) or not value.strip()
    ]
    if missing:
        raise ConfigError(f"{place}: it needs a text for {', '.join(missing)}", param="data")
    video, question, answer = map(str, texts)
    choices: Any = row.get("choices") or []
    if path.suffix == ".csv" and choices:
        choices = [each.strip() for each in choices.split(SEPARATOR)]
    name = row.get("id") or f"line {number}"
    if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
        raise ConfigError(f"{place}: choices must be a list of texts", param="data")
    if len(choices) > 26:
        raise ConfigError(f"{place}: choices may be 26 at most", param="data")
    if not (path.parent / video).is_file():
        raise ConfigError(f"{place}: there is no video {video}", param="data")
    item = VideoItem(str(name), path.parent / video, question, answer.strip(), tuple(choices))
    if choices and answer.strip() not in (*choices, *letters(item)):
        raise ConfigError(f"{place}: answer must be one of the choices or its letter", param="data")
    return item


def letters(item: VideoItem) -> str:
    """Return the letters of the item's choices."""
    return "".join(chr(ord("A") + place) for place in range(len(item.choices)))
