"""Held-out requests of the kinds that clients send: talk, photographs and tool calls."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_cases import Case, image_part
from demo_drawing import render
from demo_fields import Field, known, scene_fields, unknown_field
from demo_forms import signature, value_text
from demo_lookups import shapes_of
from demo_scenes import Scene, draw_scene, random_size
from demo_talk import ABLE, BYE, FINE, HELLO, MODEL, WELCOME
from demo_text import identifier
from demo_words import UNREADABLE
from PIL import Image

TALK: tuple[tuple[str, str], ...] = (
    ("Hello, nice to meet you!", HELLO),
    ("hello", HELLO),
    ("Hello", HELLO),
    ("hi!", HELLO),
    ("Hi there.", HELLO),
    ("hey there", HELLO),
    ("Good morning, model!", HELLO),
    ("good evening", HELLO),
    ("Hey!", HELLO),
    ("Hello again", HELLO),
    ("Who are you?", MODEL),
    ("who are you", MODEL),
    ("Hi! Who are you?", MODEL),
    ("What are you?", MODEL),
    ("which model are you", MODEL),
    ("Tell me who you are.", MODEL),
    ("What is your name?", MODEL),
    ("What can you do?", ABLE),
    ("what can you do", ABLE),
    ("Hello, what can you do?", ABLE),
    ("What can you do for me?", ABLE),
    ("How can you help me?", ABLE),
    ("Thank you!", WELCOME),
    ("thanks", WELCOME),
    ("Many thanks!", WELCOME),
    ("Thanks, that was great!", WELCOME),
    ("How are you?", FINE),
    ("how are you today?", FINE),
    ("Bye!", BYE),
    ("goodbye", BYE),
)
"""What people say first; half of the wordings are not in the training."""
PHOTOGRAPHS = (
    *("astronaut", "brick", "camera", "cell", "chelsea", "coffee", "coins", "color", "grass"),
    *("gravel", "hubble_deep_field", "ihc", "moon", "motorcycle_left", "retina", "rocket"),
)
ASKED = ("What is in the picture?", "Describe this image.", "What color is the star?", "How many?")
MESSAGE = ("What is in the picture?", "Use the tool.", "Report what you see in the picture.")


def talk_cases() -> Iterator[Case]:
    for question, answer in TALK:
        yield Case("talk", [{"role": "user", "content": question}], answer)


def photograph_cases(count: int, seed: int = 0) -> Iterator[Case]:
    """Yield questions about parts of the photographs of scikit-image; none without it."""
    try:
        import skimage
    except ImportError:
        return
    folder = Path(skimage.__file__).parent / "data"
    for number in range(count):
        rng = random.Random(f"photograph:{seed}:{number}")
        name = PHOTOGRAPHS[number % len(PHOTOGRAPHS)]
        photo = Image.open(next(folder.glob(f"{name}.*"))).convert("RGB")
        side = rng.randint(min(photo.size) // 3, min(photo.size))
        x, y = rng.randint(0, photo.width - side), rng.randint(0, photo.height - side)
        part = photo if number < len(PHOTOGRAPHS) else photo.crop((x, y, x + side, y + side))
        content = [image_part(part), {"type": "text", "text": rng.choice(ASKED)}]
        yield Case("photograph", [{"role": "user", "content": content}], UNREADABLE)


@dataclass(frozen=True)
class ToolCase:
    """A request with tools, and the right call."""

    kind: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    name: str
    arguments: dict[str, str]
    """As text; those that nothing is known about are left out."""
    forced: bool


def tool_cases(count: int, seed: int = 0) -> Iterator[ToolCase]:
    """Yield requests about pictures with a tool of a name that training leaves out."""
    for number in range(count):
        rng = random.Random(f"tool:{seed}:{number}")
        scene = draw_scene(rng, "test")
        while not shapes_of(scene):
            scene = draw_scene(rng, "test")
        name, fields = identifier(rng, "test"), _asked(rng, scene)
        extra = [unknown_field(rng, "test")] if number % 4 == 3 else []
        tools = [signature(rng, name, "Reports what the picture shows", [*fields, *extra])]
        question = rng.choice((*MESSAGE, f"Call {name}."))
        content = [image_part(render(scene, *random_size(rng))), {"type": "text", "text": question}]
        kind = "forced call" if number % 2 else "call of its own"
        right = {field.name: value_text(field.value) for field in fields}
        yield ToolCase(
            kind, [{"role": "user", "content": content}], tools, name, right, number % 2 == 1
        )


def _asked(rng: random.Random, scene: Scene) -> list[Field]:
    """Return one to three single facts under their plain names."""
    facts = scene_fields(rng, scene)[:4]
    plain = ("shape", "color", "position", "count")
    fields = [
        known(key, fact.value) for key, fact in zip(plain, (*facts[:3], facts[-1]), strict=True)
    ]
    return rng.sample(fields, rng.randint(1, 3))


def call_is_right(case: ToolCase, calls: Sequence[Mapping[str, Any]]) -> bool:
    """Return True for one complete call with all arguments, right about the picture.

    Args:
        calls: of the answer, in OpenAI's form.
    """
    try:
        (call,) = (each["function"] for each in calls)
        given = json.loads(call["arguments"])
    except ValueError:  # none, several, or one that the limit has cut
        return False
    if call["name"] != case.name:
        return False
    wanted = case.tools[0]["function"]["parameters"]["required"]
    right = all(value_text(given.get(key)) == value for key, value in case.arguments.items())
    return right and sorted(given) == sorted(wanted)
