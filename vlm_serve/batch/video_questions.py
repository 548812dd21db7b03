"""Reads questions about videos from a folder, a CSV file or JSON lines, with line numbers."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_serve.errors import ConfigError
from vlm_serve.preprocess.media.fetch import VIDEO_SUFFIXES


@dataclass(frozen=True, slots=True)
class VideoQuestion:
    """One question about one video.

    Attributes:
        id: from the input if given, else a digest of video and question.
        video: its name in the input.
        url: the URL in the request.
        file: the video's file; None for a URL.
    """

    id: str
    video: str
    text: str
    url: str
    file: Path | None


def read_questions(source: Path, questions: Sequence[str]) -> list[VideoQuestion]:
    """Read the questions in the input's order, without duplicates.

    Args:
        source: a folder, searched recursively, or a .csv or .jsonl file with `video`, `question`
            and optionally `id`. Its paths are relative to its own folder.
        questions: asked about every video; the file's own are then optional.

    Raises ConfigError with the problem and the file's line.
    """
    if source.is_dir():
        rows: list[Fields] = [(video, None, None) for video in _videos_below(source)]
        root = source
    elif source.suffix in SUFFIXES:
        rows = [_fields(row, source, number) for number, row in read_rows(source, "input")]
        root = source.parent
    elif not source.exists():
        raise ConfigError(f"{source}: No such file or directory", param="input")
    else:
        raise ConfigError(
            f"{source}: the input must be a folder, a .csv or a .jsonl file", param="input"
        )
    if not rows:
        raise ConfigError(f"{source}: there are no videos", param="input")
    by_id: dict[str, VideoQuestion] = {}
    for video, text, name in rows:
        texts = questions if text is None else (text, *questions)
        if not texts:
            raise ConfigError(
                f"{source}: no question about {video}; give --question", param="input"
            )
        for number, prompt in enumerate(dict.fromkeys(texts)):
            question = _question(root, video, prompt, name if number == 0 else None)
            other = by_id.setdefault(question.id, question)
            if (other.video, other.text) != (video, prompt):
                raise ConfigError(f"{source}: the id {question.id!r} appears twice", param="input")
    return list(by_id.values())


def _question(root: Path, video: str, text: str, name: str | None) -> VideoQuestion:
    digest = hashlib.blake2b(json.dumps([video, text]).encode(), digest_size=12)
    file = None
    url = video
    if not video.lower().startswith(("http://", "https://", "data:", "file://")):
        # A missing file fails its question, not the run.
        file = (root / video).resolve()
        url = file.as_uri()
    return VideoQuestion(name or f"video_qa_{digest.hexdigest()}", video, text, url, file)


def _videos_below(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.suffix.lower() in VIDEO_SUFFIXES and path.is_file()
    )


Fields = tuple[str, str | None, str | None]
"""Video, question and id of a row."""


def _fields(row: dict[str, Any], path: Path, number: int) -> Fields:
    video, text, name = (row.get(key) or None for key in ("video", "question", "id"))
    if not isinstance(video, str) or not all(
        value is None or isinstance(value, str) for value in (text, name)
    ):
        raise ConfigError(f"{path}, line {number}: video and question must be texts", param="input")
    return video, text, name


SUFFIXES = (".csv", ".jsonl")


def read_rows(path: Path, param: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line numbers and rows of a file; its suffix must be one of `SUFFIXES`.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or a line is not a row; `param` is the
            option with the file's name.
    """
    rows = _csv_rows if path.suffix == ".csv" else _json_rows
    try:
        yield from rows(path, param)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param=param) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: it is not UTF-8 text", param=param) from None


def _csv_rows(path: Path, param: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                yield reader.line_num, row
        except csv.Error as error:
            raise ConfigError(f"{path}, line {reader.line_num}: {error}", param=param) from None


def _json_rows(path: Path, param: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, line {number}: it is not a JSON object", param=param)
            yield number, row
