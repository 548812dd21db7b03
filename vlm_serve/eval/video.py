"""Questions about videos with their right answers, from a CSV file or JSON lines.

Those about the same video are asked in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vlm_serve.batch.video_questions import SUFFIXES, read_rows
from vlm_serve.errors import ConfigError
from vlm_serve.eval.replies import (
    AnswerOptions,
    BenchmarkPart,
    Case,
    Reply,
    tokens_of,
    turn_answer_of,
)
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

_NOTE = (
    "All questions about a video but the first can reuse it: its vision embeddings, and the KV and "
    "state computed from them."
)
_LETTER = re.compile(r"\W*([A-Z])(?:\W|$)")


def video_parts(items: Sequence[VideoItem], options: AnswerOptions) -> Iterator[BenchmarkPart]:
    """Yield the parts of the benchmark; questions about one video form a group.

    Raises FieldError for a number out of bounds.
    """
    videos: dict[Any, list[VideoItem]] = {}
    for item in items:
        videos.setdefault(item.video, []).append(item)
    for decoding in options.decoding:
        params = options.params(decoding)
        groups = [
            [Case(item.id, partial(_ask, item=item, params=params)) for item in group]
            for group in videos.values()
        ]
        yield BenchmarkPart(f"video QA, {decoding}", _NOTE, groups)


def _ask(pipe: Pipeline, *, item: VideoItem, params: SamplingParams) -> Reply:
    content = [{"type": "video", "video": item.video}, {"type": "text", "text": _text(item)}]
    output = pipe.chat([{"role": "user", "content": content}], params)
    chosen, right = judged(item, output.text)
    return Reply(
        item.id,
        (turn_answer_of(output),),
        chosen=chosen,
        expected=item.answer,
        right=right,
        tokens=tokens_of([output]),
    )


def judged(item: VideoItem, text: str) -> tuple[str, bool]:
    """Return the answer that a text gives, and whether it is right.

    Case, spaces around words and a full stop are ignored, and a letter stands for its choice.
    """
    chosen = _chosen(item, text)
    return chosen, _plain(chosen) == _plain(_spelt(item, item.answer))


def _text(item: VideoItem) -> str:
    if not item.choices:
        return item.question
    pairs = zip(letters(item), item.choices, strict=True)
    listed = "\n".join(f"({letter}) {choice}" for letter, choice in pairs)
    return f"{item.question}\n{listed}\nAnswer with the letter of the right choice."


def _chosen(item: VideoItem, text: str) -> str:
    """Return the choice whose letter begins the text; else the text itself."""
    if not item.choices:
        return text
    match = _LETTER.match(text)
    return _spelt(item, match[1]) if match else text


def _spelt(item: VideoItem, answer: str) -> str:
    """Return the choice of a letter; any other answer unchanged."""
    if answer in item.choices:
        return answer
    return dict(zip(letters(item), item.choices, strict=True)).get(answer, answer)


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(".")


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
    questions: dict[str, VideoItem] = {}
    for number, row in read_rows(path, "data"):
        if limit is not None and len(questions) == limit:
            break
        place = f"{path}, line {number}"
        item = _item(path, row, number, place)
        if questions.setdefault(item.id, item) is not item:
            raise ConfigError(f"{place}: the id {item.id!r} appears twice", param="data")
    if not questions:
        raise ConfigError(f"{path}: there are no questions", param="data")
    return list(questions.values())


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
        choices = [choice.strip() for choice in choices.split(SEPARATOR)]
    name = row.get("id") or f"line {number}"
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
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
