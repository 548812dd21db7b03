"""Questions about videos; those about the same video are asked in order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vlm_serve.eval.choices import DECODING
from vlm_serve.eval.replies import (
    BenchmarkPart,
    Case,
    Reply,
    completion_of,
    sampling_of,
    tokens_of,
)
from vlm_serve.eval.video_data import VideoItem, letters
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

_NOTE = (
    "All questions about a video but the first can reuse it: its vision embeddings, and the KV and "
    "state computed from them."
)
_LETTER = re.compile(r"\W*([A-Z])(?:\W|$)")


@dataclass(frozen=True, slots=True)
class VideoBenchmarkOptions:
    """Options of the questions, as in `LongBenchOptions`."""

    decoding: tuple[str, ...] = DECODING
    max_tokens: int = 128
    temperature: float = 0.7
    seed: int = 0


def video_parts(
    items: Sequence[VideoItem], options: VideoBenchmarkOptions
) -> Iterator[BenchmarkPart]:
    """Yield the parts of the benchmark; questions about one video form a group.

    Raises FieldError for a number out of bounds.
    """
    videos: dict[Any, list[VideoItem]] = {}
    for item in items:
        videos.setdefault(item.video, []).append(item)
    for decoding in options.decoding:
        params = sampling_of(decoding, options.max_tokens, options.temperature, options.seed)
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
        (completion_of(output),),
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
    found = _LETTER.match(text)
    return _spelt(item, found[1]) if found else text


def _spelt(item: VideoItem, answer: str) -> str:
    """Return the choice of a letter; any other answer unchanged."""
    if answer in item.choices:
        return answer
    return dict(zip(letters(item), item.choices, strict=True)).get(answer, answer)


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(".")
