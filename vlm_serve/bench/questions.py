"""Prompts and pictures that no server has seen before."""

from __future__ import annotations

import base64
import io
import random
from typing import Any

PICTURE_PIXELS = 448
_TEXT = (
    "after again air animal answer apple around autumn basket before bell between bird blue board "
    "boat book bread bridge bright bring brother build butter carry chair child clear climb cloud "
    "coat cold corner country cover dark deep door drink early earth east evening field find fire "
    "first fish floor flower follow forest garden glass gold grass green ground hand harbour "
    "heavy hill horse house island kitchen lamp large late leaf letter light listen little long "
    "market"
)
WORDS = tuple(_TEXT.split())
QUESTIONS = ("What is in this picture?", "Which color is the largest shape?")


def text(words: int, body_seed: int, own_seed: int) -> str:
    """Return a prompt of random words.

    Args:
        words: how many.
        body_seed: decides all but the beginning.
        own_seed: decides the beginning, so that no prefix is shared with any other prompt.
    """
    own, body = random.Random(own_seed), random.Random(body_seed)
    begin = [own.choice(WORDS) for _ in range(min(words, 16))]
    rest = [body.choice(WORDS) for _ in range(words - len(begin))]
    return " ".join(begin + rest)


def picture(seed: int) -> str:
    """Return the data: URL of a PNG of random shapes."""
    from PIL import Image, ImageDraw

    chosen, size = random.Random(seed), PICTURE_PIXELS
    image = Image.new("RGB", (size, size), _colour(chosen))
    pen = ImageDraw.Draw(image)
    for _ in range(24):
        left, top = chosen.randrange(size - 40), chosen.randrange(size - 40)
        box = (left, top, left + chosen.randint(30, 160), top + chosen.randint(30, 160))
        draw = chosen.choice((pen.ellipse, pen.rectangle))
        draw(box, fill=_colour(chosen))
    data = io.BytesIO()
    image.save(data, "png")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def about(url: str, question: str) -> list[dict[str, Any]]:
    """Return the parts of a message with a picture before its question."""
    return [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": question},
    ]


def _colour(chosen: random.Random) -> tuple[int, int, int]:
    return chosen.randrange(256), chosen.randrange(256), chosen.randrange(256)
