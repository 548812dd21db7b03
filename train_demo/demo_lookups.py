"""Questions that ask for one property of one thing in a picture.

A question function takes a random generator and the scene and returns a `Turn`, or None if its
question has no unambiguous answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from demo_scenes import SHAPES, Scene, Thing
from demo_words import (
    PLACES,
    Turn,
    color,
    is_colour,
    is_missing,
    is_so,
    is_where,
    named,
    noun,
    sentence,
    with_article,
)

Ask = Callable[[random.Random, Scene], Turn | None]


def shapes_of(scene: Scene) -> list[Thing]:
    return [thing for thing in scene.things if thing.kind in SHAPES]


def unique_kind(rng: random.Random, scene: Scene) -> Thing | None:
    kinds = [thing.kind for thing in scene.things]
    found = [t for t in shapes_of(scene) if kinds.count(t.kind) == 1]
    return rng.choice(found) if found else None


def _unique_colour(rng: random.Random, scene: Scene) -> Thing | None:
    colours = [thing.colour for thing in scene.things]
    found = [t for t in shapes_of(scene) if colours.count(t.colour) == 1]
    return rng.choice(found) if found else None


def reference(rng: random.Random, scene: Scene, thing: Thing) -> str:
    """Return words that name one thing of the scene unambiguously."""
    same_kind = sum(other.kind == thing.kind for other in scene.things)
    short = same_kind == 1 and rng.random() < 0.6
    return thing.kind if short else named(thing)


def ask_colour(rng: random.Random, scene: Scene) -> Turn | None:
    thing = unique_kind(rng, scene)
    if thing is None:
        return None
    wordings = [
        f"What {color(rng)} is the {thing.kind}?",
        f"What {color(rng)} is the {thing.kind}?",
        f"Which {color(rng)} is the {thing.kind}?",
        f"What is the {color(rng)} of the {thing.kind}?",
        f"Tell me the {color(rng)} of the {thing.kind}.",
        f"The {thing.kind} is what {color(rng)}?",
    ]
    return Turn("colour", rng.choice(wordings), is_colour(thing))


def ask_shape(rng: random.Random, scene: Scene) -> Turn | None:
    thing = _unique_colour(rng, scene)
    if thing is None:
        return None
    wordings = [
        f"What shape is {thing.colour}?",
        f"Which shape is {thing.colour}?",
        f"What is the {thing.colour} shape?",
        f"What shape is the {thing.colour} one?",
        f"What is {thing.colour}?",
    ]
    if len(scene.things) == 1:
        wordings += ["What shape is this?", "Which shape do you see?", "What shape is it?"]
    return Turn("shape", rng.choice(wordings), sentence(with_article(thing.kind)))


def ask_what_where(rng: random.Random, scene: Scene) -> Turn | None:
    thing = rng.choice(scene.things)
    if thing not in shapes_of(scene):
        return None
    place = PLACES[thing.row, thing.column]
    middle = place == "middle"
    wordings = [
        f"What is {'in' if middle else 'at'} the {place}?",
        f"Which shape is {'in' if middle else 'at'} the {place}?",
        f"What do you see {'in' if middle else 'at'} the {place}?",
    ]
    if not _place_is_clear(scene, thing):
        return None
    return Turn("what is where", rng.choice(wordings), sentence(with_article(named(thing))))


def _place_is_clear(scene: Scene, thing: Thing) -> bool:
    """Return True if "at the left" cannot mean another thing at the top left."""
    for other in scene.things:
        if other is thing:
            continue
        same_row = thing.row == "mid" or thing.row == other.row
        same_column = thing.column == "mid" or thing.column == other.column
        if same_row and same_column:
            return False
    return True


def ask_where(rng: random.Random, scene: Scene) -> Turn | None:
    thing = rng.choice(scene.things)
    name = "digit" if thing.kind not in SHAPES else reference(rng, scene, thing)
    place = PLACES[thing.row, thing.column]
    wordings = (
        f"Where is the {name}?",
        f"Where is the {name}?",
        f"Where do you see the {name}?",
        f"In which part of the {noun(rng)} is the {name}?",
    )
    return Turn("position", rng.choice(wordings), is_where(name, place))


def ask_side(rng: random.Random, scene: Scene) -> Turn | None:
    thing = rng.choice(scene.things)
    name = "digit" if thing.kind not in SHAPES else reference(rng, scene, thing)
    if rng.random() < 0.5 and thing.column != "mid":
        sides, answer = ["left", "right"], "left" if thing.column == "low" else "right"
    elif thing.row != "mid":
        sides, answer = ["top", "bottom"], "top" if thing.row == "low" else "bottom"
    else:
        return None
    rng.shuffle(sides)
    question = rng.choice(
        (
            f"Is the {name} at the {sides[0]} or at the {sides[1]}?",
            f"Is the {name} in the {sides[0]} or the {sides[1]} half?",
        )
    )
    return Turn("side", question, f"At the {answer}.")


def ask_missing(rng: random.Random, scene: Scene) -> Turn | None:
    absent = [kind for kind in SHAPES if all(thing.kind != kind for thing in scene.things)]
    kind = rng.choice(absent)
    question = rng.choice((f"What {color(rng)} is the {kind}?", f"Where is the {kind}?"))
    return Turn("missing", question, is_missing(kind))


def ask_digit(rng: random.Random, scene: Scene) -> Turn | None:
    thing = scene.things[0]
    if thing.kind in SHAPES:
        return None
    wordings = (
        "What digit is this?",
        "Which digit do you see?",
        f"Which digit is in the {noun(rng)}?",
        "What number is this?",
        "Which number is shown?",
        "Read the digit.",
    )
    return Turn("digit", rng.choice(wordings), f"{thing.kind}.")


def ask_digit_more(rng: random.Random, scene: Scene) -> Turn | None:
    thing = scene.things[0]
    if thing.kind in SHAPES:
        return None
    if rng.random() < 0.5:
        wordings = (
            f"What {color(rng)} is the digit?",
            f"Which {color(rng)} is the number?",
            f"What {color(rng)} is it?",
        )
        return Turn("colour", rng.choice(wordings), sentence(thing.colour))
    other = rng.choice((thing.kind, thing.kind, rng.choice("0123456789")))
    question = rng.choice((f"Is this a {other}?", f"Is the digit a {other}?"))
    return Turn("yes or no", question, is_so(f"a {other}", other == thing.kind))
