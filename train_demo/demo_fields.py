"""Named values of JSON and of tool arguments: what a picture tells, what a text tells, the rest.

A name that asks for nothing known gets "unknown", 0, false or an empty list.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from demo_questions import caption
from demo_records import (
    ANSWER_NAMES,
    CAPTION_NAMES,
    CERTAIN_NAMES,
    COLOUR_NAMES,
    COUNT_NAMES,
    KIND_NAMES,
    LIST_NAMES,
    OTHER_NAMES,
    PLACE_NAMES,
)
from demo_scenes import DIGITS, SHAPES, Scene, Thing
from demo_text import capital_name, identifier
from demo_words import PLACES, UNREADABLE, named, plural

Schema = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """A name, its JSON schema and its right value."""

    name: str
    schema: Schema
    value: Any


def schema_of(value: Any) -> Schema:
    """Return a JSON schema of the kind of a value."""
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, int):
        return {"type": "integer"}
    if isinstance(value, float):
        return {"type": "number"}
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0]) if value else {"type": "string"}}
    if isinstance(value, dict):
        return of({name: schema_of(each) for name, each in value.items()})
    return {"type": "string"}


def of(properties: dict[str, Schema]) -> Schema:
    """Return the schema of an object."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def known(name: str, value: Any, choices: Sequence[str] = ()) -> Field:
    """Return a field; with `choices` it is one of them."""
    return Field(
        name, {"type": "string", "enum": list(choices)} if choices else schema_of(value), value
    )


def unknown_field(rng: random.Random, split: str) -> Field:
    """Return a field that nothing is known about."""
    name = identifier(rng, split)
    if split == "train" and rng.random() < 0.4:
        name = rng.choice(OTHER_NAMES)
    value: Any = rng.choice(("unknown", "unknown", "unknown", 0, 0.0, False, []))
    return Field(name, schema_of(value), value)


def thing_fields(rng: random.Random, thing: Thing) -> list[Field]:
    """Return the facts about one thing, each under one of its names."""
    place = PLACES[thing.row, thing.column]
    made = [
        known(rng.choice(KIND_NAMES), thing.kind),
        known(rng.choice(COLOUR_NAMES), thing.colour),
        known(rng.choice(PLACE_NAMES), place),
    ]
    if thing.kind in DIGITS:
        made.append(
            known(rng.choice(("digit", "number")), rng.choice((thing.kind, int(thing.kind))))
        )
    return made


def scene_fields(rng: random.Random, scene: Scene) -> list[Field]:
    """Return facts about the picture, the first of them about its first thing."""
    if not scene.things:
        return _unreadable_fields(rng)
    order = scene.reading_order
    kinds = [thing.kind for thing in order]
    made = thing_fields(rng, order[0])
    made.append(known(rng.choice(COUNT_NAMES), len(order)))
    made.append(known(rng.choice(CAPTION_NAMES), caption(scene)))
    kind = rng.choice(kinds if rng.random() < 0.5 else SHAPES)
    made.append(known(rng.choice((f"has_{kind}", f"contains_{kind}")), kind in kinds))
    made.append(known(plural(kind), kinds.count(kind)))
    made.append(_listed(rng, scene))
    return made


def _listed(rng: random.Random, scene: Scene) -> Field:
    order, style = scene.reading_order, rng.choice(("names", "colours", "things", "things"))
    if style == "names":
        return known(rng.choice(LIST_NAMES), [named(thing) for thing in order])
    if style == "colours":
        return known(rng.choice(("colors", "colours")), colours_of(scene))
    fields = rng.choice((("shape", "color"), ("shape",), ("color", "shape"), ("shape", "position")))
    return known(rng.choice(LIST_NAMES), [short(thing, fields) for thing in order])


def colours_of(scene: Scene) -> list[str]:
    """Return the colours in reading order, each once."""
    return list(dict.fromkeys(thing.colour for thing in scene.reading_order))


def short(thing: Thing, fields: Sequence[str]) -> dict[str, str]:
    """Return some facts about a thing under their plain names."""
    says = {
        "shape": thing.kind,
        "color": thing.colour,
        "position": PLACES[thing.row, thing.column],
    }
    return {field: says[field] for field in fields}


def _unreadable_fields(rng: random.Random) -> list[Field]:
    made = [
        known(rng.choice(names), "unknown") for names in (KIND_NAMES, COLOUR_NAMES, PLACE_NAMES)
    ]
    made.append(known(rng.choice(COUNT_NAMES), 0))
    made.append(known(rng.choice(CAPTION_NAMES), UNREADABLE))
    made.append(known(rng.choice(LIST_NAMES), []))
    return made


def chosen(rng: random.Random, facts: Sequence[Field], split: str = "train") -> list[Field]:
    """Return one to four facts in random order, and now and then fields that nobody knows."""
    some = rng.sample(list(facts), min(len(facts), rng.choice((1, 2, 2, 3, 3, 4))))
    while not some or rng.random() < 0.25:
        some.append(unknown_field(rng, split))
    if rng.random() < 0.1:
        some.append(known(rng.choice(CERTAIN_NAMES), 1.0))
    rng.shuffle(some)
    return list({field.name: field for field in some}.values())


Told = tuple[str, list[Field]]
"""A text, and what it tells."""


def told(rng: random.Random, split: str) -> Told:
    """Return a text with values to copy, and the fields that ask for them."""
    style = rng.random()
    name, place, age = capital_name(rng), capital_name(rng), rng.randrange(1, 100)
    if style < 0.3:
        text = rng.choice((f"{name} is {age} years old", f"I am {name} and I am {age} years old"))
        fields = [known("name", name), known("age", age)]
        if rng.random() < 0.5:
            text += rng.choice((f" and lives in {place}", f" and comes from {place}"))
            fields.append(known(rng.choice(("city", "location")), place))
        text = (
            rng.choice(("", "", "Extract: ", "Extract the person: ", "Extract the data: ")) + text
        )
        return text + rng.choice((".", "")), fields
    if style < 0.45:
        a, b = rng.randrange(1000), rng.randrange(100)
        names = rng.choice((("a", "b"), ("x", "y"), ("first", "second")))
        word = rng.choice(("plus", "times", "minus", "+", "*", "and"))
        asks = rng.choice(("What is {}?", "Compute {}.", "Calculate {}.", "How much is {}?", "{}"))
        return asks.format(f"{a} {word} {b}"), [known(names[0], a), known(names[1], b)]
    if style < 0.65:
        asks = rng.choice(
            (
                "What is the weather in {}?",
                "What's the weather in {}?",
                "What is the weather like in {} today?",
                "Weather in {}",
                "What time is it in {}?",
                "How warm is it in {}?",
                "Tell me about {}.",
                "Search for {}.",
                "Find {}.",
                "Look up {}.",
            )
        )
        keys = (
            ("query", "q", "text", "search") if asks[0] in "TSFL" else ("city", "location", "place")
        )
        return asks.format(place), [known(rng.choice(keys), place)]
    pairs: list[Field] = []
    for _ in range(rng.randint(1, 3)):
        value: Any = rng.choice((name, place, age, f"{name} {place}", capital_name(rng)))
        pairs.append(known(identifier(rng, split), value))
    pairs = list({field.name: field for field in pairs}.values())
    joint = rng.choice((": {}", " is {}", " = {}"))
    texts = [field.name.replace("_", " ") + joint.format(field.value) for field in pairs]
    opening = rng.choice(("", "The ", "Extract: ", "Save this: ", "Take note: "))
    return opening + ", ".join(texts) + rng.choice((".", "")), pairs


def answer_field(rng: random.Random, answer: str) -> Field:
    """Return the answer to the question as a field."""
    return known(rng.choice(ANSWER_NAMES), answer)
