"""Questions and judgement of lmms-eval's two tasks about the demo model's scenes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

MEDIA = Path(__file__).resolve().parents[1]


def pictures(row: dict[str, Any]) -> list[Image.Image]:
    """Return the picture of a row."""
    with Image.open(MEDIA / row["image"]) as picture:
        return [picture.convert("RGB")]


def videos(row: dict[str, Any]) -> list[str]:
    """Return the path of a row's video."""
    return [str(MEDIA / row["video"])]


def picture_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the question about a picture in lmms-eval's form."""
    return _asked(row, {"type": "image", "url": pictures(row)[0]})


def video_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the question about a video in lmms-eval's form."""
    return _asked(row, {"type": "video", "url": videos(row)[0]})


def _asked(row: dict[str, Any], medium: dict[str, Any]) -> list[dict[str, Any]]:
    content = [medium, {"type": "text", "text": row["question"]}]
    return [{"role": "user", "content": content}]


def judge(row: dict[str, Any], answers: list[str]) -> dict[str, float]:
    """Return 1 for the expected sentence, ignoring case, spaces and a full stop."""
    said, expected = (" ".join(t.lower().split()).rstrip(".") for t in (answers[0], row["answer"]))
    return {"right": float(said == expected)}


def share(found: list[float]) -> float:
    """Return the share of right answers."""
    return sum(found) / len(found)
