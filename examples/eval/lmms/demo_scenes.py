"""What lmms-eval's two tasks about the demo model's scenes ask, and what is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

MEDIA = Path(__file__).resolve().parents[1]


def pictures(row: dict[str, Any]) -> list[Image.Image]:
    """The picture of a row."""
    with Image.open(MEDIA / row["image"]) as picture:
        return [picture.convert("RGB")]


def videos(row: dict[str, Any]) -> list[str]:
    """The path of a row's video."""
    return [str(MEDIA / row["video"])]


def picture_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The question about a picture, in lmms-eval's form."""
    return _asked(row, {"type": "image", "url": pictures(row)[0]})


def video_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The question about a video, in lmms-eval's form."""
    return _asked(row, {"type": "video", "url": videos(row)[0]})


def _asked(row: dict[str, Any], medium: dict[str, Any]) -> list[dict[str, Any]]:
    content = [medium, {"type": "text", "text": row["question"]}]
    return [{"role": "user", "content": content}]


def judge(row: dict[str, Any], answers: list[str]) -> dict[str, float]:
    """1 for the expected sentence, case, spaces and a full stop aside."""
    said, expected = (" ".join(t.lower().split()).rstrip(".") for t in (answers[0], row["answer"]))
    return {"right": float(said == expected)}


def share(found: list[float]) -> float:
    """Of right answers."""
    return sum(found) / len(found)
