"""Chats about photographs, as several people would send them to a server at the same time.

Measured are the time of all of them and the share of the prompts that was cached."""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

PHOTOGRAPHS = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "hubble_deep_field.jpg",
    "motorcycle_left.png",
    "rocket.jpg",
)
QUESTIONS = (
    "What is shown here?",
    "Which colours do you see, and where?",
    "Describe the background in one sentence.",
    "Is there anything unusual about it?",
)
CLIENTS, ANSWER_TOKENS, LONGEST_SIDE = 4, 16, 640


class Server(Protocol):
    """Something that answers chats over HTTP."""

    def post(self, path: str, body: dict[str, Any]) -> tuple[Any, float]: ...


@dataclass(frozen=True)
class Outcome:
    """What one round took.

    Attributes:
        seconds: from the first request to the last answer.
        cached, prompt: tokens of all prompts, those from the cache and all.
    """

    seconds: float
    cached: int
    prompt: int


def requests(round_number: int) -> list[dict[str, Any]]:
    """Every question about every photograph, each photograph once before any comes again.

    Another round crops them elsewhere, so that no cache knows its pixels.
    """
    pictures = [_picture(name, round_number) for name in PHOTOGRAPHS]
    return [_chat(picture, question) for question in QUESTIONS for picture in pictures]


def _picture(name: str, round_number: int) -> str:
    """A JPEG of the photograph as a data: URL."""
    spec = importlib.util.find_spec("skimage")
    assert spec is not None and spec.origin is not None, "scikit-image, for its photographs"
    with Image.open(Path(spec.origin).parent / "data" / name) as opened:
        image = opened.convert("RGB")
    margin = 16
    left = round_number % margin
    image = image.crop((left, left, image.width - margin + left, image.height - margin + left))
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    data = io.BytesIO()
    image.save(data, "jpeg", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()


def _chat(picture: str, question: str) -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": picture}},
        {"type": "text", "text": question},
    ]
    return {
        "model": "model",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }


def replay(server: Server, trace: list[dict[str, Any]], clock: Callable[[], float]) -> Outcome:
    """Sends the requests in their order, as many at once as there are clients."""
    begin = clock()
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(
            clients.map(lambda body: server.post("/v1/chat/completions", body)[0], trace)
        )
    seconds = clock() - begin
    usages = [answer["usage"] for answer in answers]
    made = sum(usage["completion_tokens"] for usage in usages)
    if made != ANSWER_TOKENS * len(trace):
        raise RuntimeError(f"{made} tokens for {len(trace)} answers of {ANSWER_TOKENS}")
    cached = sum(
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for usage in usages
    )
    return Outcome(seconds, cached, sum(usage["prompt_tokens"] for usage in usages))
