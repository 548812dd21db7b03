"""Held-out questions as chat messages, from fixed seeds outside of training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from demo_albums import draw_album, pick_album
from demo_clips import draw_clip, frame_count, render_clip
from demo_drawing import render
from demo_questions import ask_caption, follow_up, pick
from demo_scenes import draw_scene, random_size
from demo_videos import clip_caption, pick_clip
from demo_words import Turn
from PIL import Image

QUESTIONS_PER_MEDIUM = 4


@dataclass(frozen=True)
class Case:
    """One request and its right answer."""

    kind: str
    messages: list[dict[str, Any]]
    answer: str


def image_cases(count: int, seed: int = 0) -> Iterator[Case]:
    """Yield `count` questions about pictures, four per picture or album."""
    yield from _cases(count, seed, _image_talk)


def video_cases(count: int, seed: int = 0) -> Iterator[Case]:
    """Yield `count` questions about videos, four per video."""
    yield from _cases(count, seed, _video_talk)


def _cases(count: int, seed: int, talk: Any) -> Iterator[Case]:
    for medium in range(-(-count // QUESTIONS_PER_MEDIUM)):
        rng = random.Random(f"test:{talk.__name__}:{seed}:{medium}")
        media, turns = talk(rng)
        left = count - medium * QUESTIONS_PER_MEDIUM
        # Every third medium gets one conversation; otherwise each question stands alone.
        together = medium % 3 == 2 or any(turn.kind == "follow-up" for turn in turns)
        for number, turn in enumerate(turns[:left]):
            history = turns[:number] if together else []
            yield Case(turn.kind, messages(media, [*history, turn]), turn.answer)


def messages(media: list[dict[str, Any]], turns: list[Turn]) -> list[dict[str, Any]]:
    """Return a conversation with right answers to all questions but the last."""
    found: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        content: list[dict[str, Any]] = [{"type": "text", "text": turn.question}]
        found.append({"role": "user", "content": [*media, *content] if number == 0 else content})
        if number + 1 < len(turns):
            found.append({"role": "assistant", "content": turn.answer})
    return found


def image_part(picture: Image.Image) -> dict[str, Any]:
    return {"type": "image", "image": picture}


def video_part(frames: list[Image.Image], frame_rate: float) -> dict[str, Any]:
    stacked = np.stack([np.asarray(frame) for frame in frames])
    return {"type": "video", "video": stacked, "fps": frame_rate}


def _image_talk(rng: random.Random) -> tuple[list[dict[str, Any]], list[Turn]]:
    if rng.random() < 0.2:
        album = draw_album(rng, "test", rng.choice((2, 3)))
        media = [image_part(render(scene, *random_size(rng))) for scene in album]
        return media, [pick_album(rng, album) for _ in range(QUESTIONS_PER_MEDIUM)]
    scene = draw_scene(rng, "test")
    media = [image_part(render(scene, *random_size(rng)))]
    turns = [pick(rng, scene) for _ in range(QUESTIONS_PER_MEDIUM)]
    if rng.random() < 0.2:
        turns[:2] = follow_up(rng, scene) or turns[:2]
    if rng.random() < 0.4:
        described = ask_caption(rng, scene)
        assert described is not None
        turns[-1] = described
    return media, turns


def _video_talk(rng: random.Random) -> tuple[list[dict[str, Any]], list[Turn]]:
    clip = draw_clip(rng)
    width = rng.randint(64, 200)
    height = max(64, round(width * rng.choice((1.0, 1.0, 0.75, 0.5625))))
    frames = render_clip(clip, list(range(frame_count(clip))), height, width)
    turns = [pick_clip(rng, clip) for _ in range(QUESTIONS_PER_MEDIUM)]
    if rng.random() < 0.4:
        turns[-1] = Turn("video description", "Describe the video.", clip_caption(clip))
    return [video_part(frames, clip.frame_rate)], turns
