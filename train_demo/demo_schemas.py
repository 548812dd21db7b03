"""Held-out requests for JSON of a schema that the model does not see.

Strange names are made of words that training leaves out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from demo_cases import image_part
from demo_drawing import render
from demo_questions import caption
from demo_scenes import SHAPES, Scene, draw_scene, random_size
from demo_text import identifier
from demo_words import PLACES, named

KINDS = ("known", "unasked question", "list", "nested", "strange names")


@dataclass(frozen=True)
class SchemaCase:
    """One request, the JSON schema of its answer, and the fields that are known."""

    kind: str
    messages: list[dict[str, Any]]
    schema: dict[str, Any]
    known: dict[str, Any]


def of(**properties: Any) -> dict[str, Any]:
    """Return pydantic's schema of a class with these fields."""
    return {"type": "object", "properties": properties, "required": list(properties)}


TEXT, WHOLE, YES = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


def schema_cases(count: int, seed: int = 0) -> Iterator[SchemaCase]:
    """Yield `count` requests about pictures from held-out seeds and writers."""
    for number in range(count):
        rng = random.Random(f"schema:{seed}:{number}")
        scene = draw_scene(rng, "test")
        question = rng.choice(("What is in the picture?", "Describe the picture.", "Extract this."))
        kind = KINDS[number % len(KINDS)]
        schema, known = _wanted(rng, scene, kind)
        picture = image_part(render(scene, *random_size(rng)))
        content = [picture, {"type": "text", "text": question}]
        yield SchemaCase(kind, [{"role": "user", "content": content}], schema, known)


def _wanted(rng: random.Random, scene: Scene, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    first = scene.reading_order[0]
    names = [named(thing) for thing in scene.reading_order]
    if kind == "list":
        return of(objects={"type": "array", "items": TEXT}), {"objects": names}
    if kind == "nested":
        things = [{"shape": thing.kind, "color": thing.colour} for thing in scene.reading_order]
        item = of(shape=TEXT, color=TEXT)
        return of(objects={"type": "array", "items": item}), {"objects": things}
    if kind == "strange names":
        asked = [identifier(rng, "test") for _ in range(3)]
        types = [rng.choice((TEXT, WHOLE, YES)) for _ in asked]
        return of(**dict(zip(asked, types, strict=True))), {}
    if kind == "unasked question":
        other = rng.choice(SHAPES)
        has = f"has_{other}"
        known = {"description": caption(scene), has: other in [t.kind for t in scene.things]}
        return of(**{"description": TEXT, has: YES}), known
    known = {
        "shape": first.kind,
        "color": first.colour,
        "position": PLACES[first.row, first.column],
        "count": len(scene.things),
    }
    asked = rng.sample(list(known), 3)
    return of(**{name: WHOLE if name == "count" else TEXT for name in asked}), {
        name: known[name] for name in asked
    }
