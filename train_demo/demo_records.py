"""Turns with a JSON answer, for grammars: `{"shape": "star", "color": "red"}`.

A grammar fixes fields and types, but the model does not see it. The model must learn the meaning of
each field name and to end its strings. Unknown names get "unknown", 0, false or [].
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from demo_albums import pick_album
from demo_clips import Clip
from demo_questions import caption, pick
from demo_scenes import DIGITS, SHAPES, Scene, Thing
from demo_videos import clip_caption, pick_clip
from demo_words import PLACES, Turn, named, plural

KIND_NAMES = ("shape", "kind", "object", "type", "figure", "label")
COLOUR_NAMES = ("color", "colour", "shape_color", "main_color")
PLACE_NAMES = ("position", "place", "location", "where")
COUNT_NAMES = ("count", "number_of_shapes", "shape_count", "total", "num_objects")
CAPTION_NAMES = ("description", "caption", "summary", "text")
ANSWER_NAMES = ("answer", "response", "result", "reply")
LIST_NAMES = ("objects", "shapes", "items", "things")
CERTAIN_NAMES = ("confidence", "score", "probability", "certainty")
OTHER_NAMES = (
    *("name", "age", "title", "author", "city", "country", "date", "email", "price", "year"),
    *("user_id", "status", "reason", "category", "language", "address", "phone", "weight"),
    *("first_name", "last_name", "street", "company", "tags", "comment", "rating", "url", "id"),
    *("temperature", "unit", "currency", "quantity", "product", "key", "value", "data", "note"),
    *("is_valid", "done", "active", "steps", "message", "code", "topic", "keywords", "mood"),
)
UNKNOWN: tuple[Any, ...] = ("unknown", "unknown", 0, 0.0, False, [])

PLEAS = ("Answer as JSON.", "Answer in JSON.", "Reply with JSON.", "Give me JSON.", "As JSON.")
ABOUT = (
    "What is in the {}?",
    "Describe the {}.",
    "Describe this {}.",
    "Extract the data.",
    "What does the {} show?",
    "What do you see?",
)

Fields = dict[str, Any]
"""What each of some names asks for."""


def picture_record(rng: random.Random, scene: Scene) -> Turn:
    """Return JSON about the requested or first thing of the picture, and about all things."""
    thing, question = scene.reading_order[0], rng.choice(ABOUT).format("picture")
    kinds = [other.kind for other in scene.things]
    if rng.random() < 0.3:
        thing = rng.choice(scene.things)
        question = f"Look at the {named(thing)}."
        if kinds.count(thing.kind) == 1 and rng.random() < 0.5:
            question = f"What about the {thing.kind}?"
    known = thing_fields(rng, thing)
    known[rng.choice(COUNT_NAMES)] = len(scene.things)
    known[rng.choice(CAPTION_NAMES)] = caption(scene)
    kind = rng.choice(kinds if rng.random() < 0.5 else SHAPES)
    known[rng.choice((f"has_{kind}", f"contains_{kind}"))] = kind in kinds
    known[plural(kind)] = kinds.count(kind)
    style = rng.choice(("names", "colours", "things"))
    listed = [named(other) for other in scene.reading_order]
    if style == "colours":
        known[rng.choice(("colors", "colours"))] = [o.colour for o in scene.reading_order]
    elif style == "names":
        known[rng.choice(LIST_NAMES)] = listed
    else:
        fields = rng.sample(("shape", "color", "position"), rng.randint(1, 3))
        each = [_short(other, fields) for other in scene.reading_order]
        known[rng.choice(LIST_NAMES)] = each
    asked = pick(rng, scene)
    return record(rng, question, known, asked)


def album_record(rng: random.Random, album: tuple[Scene, ...]) -> Turn:
    """Return JSON about several pictures of one thing each."""
    things = [scene.things[0] for scene in album]
    place = rng.randrange(len(things))
    question = f"What is in the {('first', 'second', 'third')[place]} picture?"
    known = thing_fields(rng, things[place])
    known[rng.choice(("pictures", "images", "number_of_pictures"))] = len(album)
    known[rng.choice(LIST_NAMES)] = [named(thing) for thing in things]
    return record(rng, question, known, pick_album(rng, album))


def clip_record(rng: random.Random, clip: Clip) -> Turn:
    """Return JSON about a video."""
    thing = clip.things[0]
    known: Fields = {rng.choice(CAPTION_NAMES): clip_caption(clip)}
    known[rng.choice(("seconds", "duration", "length"))] = clip.seconds
    if clip.story != "flashes":
        known[rng.choice(KIND_NAMES)] = thing.kind
    if clip.story == "motion":
        known[rng.choice(COLOUR_NAMES)] = thing.colour
        known[rng.choice(("direction", "motion", "moves"))] = clip.direction
    return record(rng, rng.choice(ABOUT).format("video"), known, pick_clip(rng, clip))


def text_record(rng: random.Random, asked: Turn) -> Turn:
    """Return JSON without a picture."""
    return record(rng, rng.choice(ABOUT).format("text"), {}, asked)


def thing_fields(rng: random.Random, thing: Thing) -> Fields:
    """Return the facts about one thing, each under one of its names."""
    known: Fields = {
        rng.choice(KIND_NAMES): thing.kind,
        rng.choice(COLOUR_NAMES): thing.colour,
        rng.choice(PLACE_NAMES): PLACES[thing.row, thing.column],
    }
    if thing.kind in DIGITS:
        known[rng.choice(("digit", "number"))] = rng.choice((thing.kind, int(thing.kind)))
    return known


def _short(thing: Thing, fields: Sequence[str]) -> Fields:
    says = {
        "shape": thing.kind,
        "color": thing.colour,
        "position": PLACES[thing.row, thing.column],
    }
    return {field: says[field] for field in fields}


def record(rng: random.Random, question: str, known: Mapping[str, Any], asked: Turn) -> Turn:
    """Combine some known and unknown fields in random order.

    Half of the questions request JSON in words, some with the fields' names. The other half rely on
    the grammar: the opening brace is given and not learned.
    """
    names = rng.sample(list(known), min(len(known), rng.choice((1, 2, 2, 3, 4))))
    fields = {name: known[name] for name in names}
    if not fields or rng.random() < 0.25:
        for name in rng.sample(OTHER_NAMES, rng.randint(1, 3)):
            fields[name] = rng.choice(UNKNOWN)
    if rng.random() < 0.2:
        fields[rng.choice(CERTAIN_NAMES)] = 1.0
    if rng.random() < 0.25:
        question, fields[rng.choice(ANSWER_NAMES)] = asked.question, asked.answer
    order = list(fields)
    rng.shuffle(order)
    text = json.dumps({name: fields[name] for name in order})
    plea = rng.random()
    if plea < 0.3:
        return Turn("record", f"{question} {rng.choice(PLEAS)}", text)
    if plea < 0.5:
        wanted = " and ".join((", ".join(order[:-1]), order[-1]) if order[1:] else order)
        return Turn("record", f"{question} Answer as JSON with {wanted}.", text)
    return Turn("record", question, text, ("{", text[1:]), frozenset({0}))
