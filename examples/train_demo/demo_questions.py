"""Questions about pictures, with the one right answer to each.

A question function gets a random generator and what is to be seen and returns a `Turn`, or None
where its question has no unambiguous answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from demo_scenes import COLOURS, SHAPES, Scene, Thing

NUMBERS = ("Zero", "One", "Two", "Three", "Four", "Five")
ORDINALS = ("first", "second", "third")
PLACES = {
    ("low", "low"): "top left",
    ("low", "mid"): "top",
    ("low", "high"): "top right",
    ("mid", "low"): "left",
    ("mid", "mid"): "middle",
    ("mid", "high"): "right",
    ("high", "low"): "bottom left",
    ("high", "mid"): "bottom",
    ("high", "high"): "bottom right",
}
REFUSAL = "Sorry, I cannot tell."
NO_PICTURE = "I see no picture."


@dataclass(frozen=True)
class Turn:
    """One question, its answer and the kind under which accuracy is counted."""

    kind: str
    question: str
    answer: str


Ask = Callable[[random.Random, Scene], Turn | None]


def color(rng: random.Random) -> str:
    """One of the two spellings."""
    return rng.choice(("color", "colour"))


def noun(rng: random.Random) -> str:
    return rng.choice(("picture", "picture", "image", "photo"))


def with_article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def named(thing: Thing) -> str:
    """Colour and kind: "red star", "blue 7"."""
    return f"{thing.colour} {thing.kind}"


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def casual(rng: random.Random, question: str) -> str:
    """Sometimes written as people type: without the capital, the question mark, or both."""
    style = rng.random()
    if style < 0.08:
        question = question[0].lower() + question[1:]
    if 0.04 < style < 0.12:
        question = question.rstrip("?.")
    return question


def _shapes(scene: Scene) -> list[Thing]:
    return [thing for thing in scene.things if thing.kind in SHAPES]


def _unique_kind(rng: random.Random, scene: Scene) -> Thing | None:
    kinds = [thing.kind for thing in scene.things]
    found = [t for t in _shapes(scene) if kinds.count(t.kind) == 1]
    return rng.choice(found) if found else None


def _unique_colour(rng: random.Random, scene: Scene) -> Thing | None:
    colours = [thing.colour for thing in scene.things]
    found = [t for t in _shapes(scene) if colours.count(t.colour) == 1]
    return rng.choice(found) if found else None


def _reference(rng: random.Random, scene: Scene, thing: Thing) -> str:
    """Words that name one thing of the scene and no other."""
    same_kind = sum(other.kind == thing.kind for other in scene.things)
    short = same_kind == 1 and rng.random() < 0.6
    return thing.kind if short else named(thing)


def ask_colour(rng: random.Random, scene: Scene) -> Turn | None:
    thing = _unique_kind(rng, scene)
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
    if len(scene.things) == 1:
        wordings += [f"What {color(rng)} is the shape?", f"What {color(rng)} is it?"]
    return Turn("colour", rng.choice(wordings), sentence(thing.colour))


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
    if thing not in _shapes(scene):
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
    """Nobody would take "at the left" for another thing that stands at the top left."""
    for other in scene.things:
        if other is thing:
            continue
        same_row = thing.row == "mid" or thing.row == other.row
        same_column = thing.column == "mid" or thing.column == other.column
        if same_row and same_column:
            return False
    return True


def ask_count(rng: random.Random, scene: Scene) -> Turn | None:
    if not _shapes(scene):
        return None
    what = rng.choice(("shapes", "shapes", "objects", "things"))
    wordings = (
        f"How many {what} are there?",
        f"How many {what} do you see?",
        f"How many {what} are in the {noun(rng)}?",
        f"Count the {what}.",
        f"What is the number of {what}?",
    )
    return Turn("count", rng.choice(wordings), NUMBERS[len(scene.things)] + ".")


def ask_count_some(rng: random.Random, scene: Scene) -> Turn | None:
    if len(scene.things) < 2:
        return None
    if rng.random() < 0.5:
        present = [thing.kind for thing in scene.things]
        kind = rng.choice(present if rng.random() < 0.75 else SHAPES)
        count, what = present.count(kind), f"{kind}s" if kind != "cross" else "crosses"
    else:
        present = [thing.colour for thing in scene.things]
        colour = rng.choice(present if rng.random() < 0.75 else tuple(COLOURS))
        count, what = present.count(colour), f"{colour} {rng.choice(('shapes', 'objects'))}"
    wordings = (
        f"How many {what} are there?",
        f"How many {what} do you see?",
        f"Count the {what}.",
    )
    return Turn("count some", rng.choice(wordings), NUMBERS[count] + ".")


def ask_where(rng: random.Random, scene: Scene) -> Turn | None:
    thing = rng.choice(scene.things)
    name = "digit" if thing.kind not in SHAPES else _reference(rng, scene, thing)
    place = PLACES[thing.row, thing.column]
    wordings = (
        f"Where is the {name}?",
        f"Where is the {name}?",
        f"Where do you see the {name}?",
        f"In which part of the {noun(rng)} is the {name}?",
    )
    answer = "In the middle." if place == "middle" else f"At the {place}."
    return Turn("position", rng.choice(wordings), answer)


def ask_side(rng: random.Random, scene: Scene) -> Turn | None:
    thing = rng.choice(scene.things)
    name = "digit" if thing.kind not in SHAPES else _reference(rng, scene, thing)
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


def ask_exists(rng: random.Random, scene: Scene) -> Turn | None:
    shapes = _shapes(scene)
    if not shapes:
        return None
    thing = rng.choice(shapes)
    kind, colour = thing.kind, thing.colour
    if rng.random() < 0.5:
        change = rng.random()
        if change < 0.6:
            colour = rng.choice([t.colour for t in shapes] + list(COLOURS))
        if change > 0.4:
            kind = rng.choice([t.kind for t in shapes] + list(SHAPES))
    what = with_article(f"{colour} {kind}")
    there = any((t.kind, t.colour) == (kind, colour) for t in shapes)
    if rng.random() < 0.3:
        what, there = with_article(kind), any(t.kind == kind for t in shapes)
    wordings = (
        f"Is there {what}?",
        f"Is there {what} in the {noun(rng)}?",
        f"Do you see {what}?",
        f"Can you see {what}?",
        f"Does the {noun(rng)} show {what}?",
    )
    return Turn("yes or no", rng.choice(wordings), "Yes." if there else "No.")


def ask_is_colour(rng: random.Random, scene: Scene) -> Turn | None:
    thing = _unique_kind(rng, scene)
    if thing is None:
        return None
    colour = thing.colour
    if rng.random() < 0.5:
        colour = rng.choice([t.colour for t in scene.things] + list(COLOURS))
    question = f"Is the {thing.kind} {colour}?"
    return Turn("yes or no", question, "Yes." if colour == thing.colour else "No.")


def _pair(rng: random.Random, scene: Scene) -> tuple[Thing, Thing] | None:
    if len(scene.things) < 2:
        return None
    one, two = rng.sample(scene.things, 2)
    return one, two


def ask_bigger(rng: random.Random, scene: Scene) -> Turn | None:
    pair = _pair(rng, scene)
    if pair is None or pair[0].big == pair[1].big:
        return None
    names = [_reference(rng, scene, thing) for thing in pair]
    big = names[0] if pair[0].big else names[1]
    small = names[1] if pair[0].big else names[0]
    style = rng.randrange(4)
    if style == 0:
        question = f"Is the {names[0]} bigger than the {names[1]}?"
        return Turn("comparison", question, "Yes." if pair[0].big else "No.")
    if style == 1:
        question = f"Which is smaller, the {names[0]} or the {names[1]}?"
        return Turn("comparison", question, f"The {small}.")
    word = rng.choice(("bigger", "larger"))
    question = f"Which is {word}, the {names[0]} or the {names[1]}?"
    return Turn("comparison", question, f"The {big}.")


def ask_extreme(rng: random.Random, scene: Scene) -> Turn | None:
    big = [thing for thing in scene.things if thing.big]
    small = [thing for thing in scene.things if not thing.big]
    options = []
    if len(big) == 1 and len(scene.things) > 1:
        options += [(f"What is the {word} shape?", big[0]) for word in ("biggest", "largest")]
    if len(small) == 1 and len(scene.things) > 1:
        options += [("What is the smallest shape?", small[0])]
    if not options:
        return None
    question, thing = rng.choice(options)
    return Turn("comparison", question, f"The {named(thing)}.")


def ask_relation(rng: random.Random, scene: Scene) -> Turn | None:
    pair = _pair(rng, scene)
    if pair is None:
        return None
    one, two = pair
    names = [_reference(rng, scene, thing) for thing in pair]
    if rng.random() < 0.5:
        gap, words = one.x - two.x, ("left of", "right of")
    else:
        gap, words = one.y - two.y, ("above", "below")
    if abs(gap) < 0.15:
        return None
    side = rng.randrange(2)
    question = f"Is the {names[0]} {words[side]} the {names[1]}?"
    return Turn("relation", question, "Yes." if (gap < 0) == (side == 0) else "No.")


def ask_missing(rng: random.Random, scene: Scene) -> Turn | None:
    absent = [kind for kind in SHAPES if all(thing.kind != kind for thing in scene.things)]
    kind = rng.choice(absent)
    question = rng.choice((f"What {color(rng)} is the {kind}?", f"Where is the {kind}?"))
    return Turn("missing", question, f"There is no {kind}.")


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
    return Turn("yes or no", question, "Yes." if other == thing.kind else "No.")


def caption(scene: Scene) -> str:
    """What the picture shows, in reading order."""
    parts = []
    for thing in scene.reading_order:
        place = PLACES[thing.row, thing.column]
        where = "in the middle" if place == "middle" else f"at the {place}"
        parts.append(f"{with_article(named(thing))} {where}")
    return sentence(", ".join(parts))


def ask_caption(rng: random.Random, scene: Scene) -> Turn | None:
    wordings = (
        f"Describe the {noun(rng)}.",
        f"Describe this {noun(rng)}.",
        f"What is in this {noun(rng)}?",
        f"What does the {noun(rng)} show?",
        f"What is in the {noun(rng)}?",
        "What do you see?",
    )
    return Turn("description", rng.choice(wordings), caption(scene))


UNKNOWABLE = (
    "Who drew this?",
    "Who made this {noun}?",
    "Who took this {noun}?",
    "When was this {noun} made?",
    "How old is this {noun}?",
    "How much does this {noun} cost?",
    "Where was this {noun} taken?",
    "What is my name?",
    "What is the weather today?",
    "What time is it?",
    "Why was this drawn?",
    "What does it smell like?",
    "Who is the artist?",
    "What happened before this?",
    "What is the name of the artist?",
)


def ask_unknowable(rng: random.Random, scene: Scene | None = None) -> Turn | None:
    del scene
    question = rng.choice(UNKNOWABLE).format(noun=noun(rng))
    return Turn("refusal", question, REFUSAL)


IMAGE_QUESTIONS: tuple[tuple[Ask, float], ...] = (
    (ask_colour, 2.0),
    (ask_shape, 2.0),
    (ask_what_where, 1.5),
    (ask_count, 1.2),
    (ask_count_some, 1.5),
    (ask_where, 1.8),
    (ask_side, 0.8),
    (ask_exists, 1.8),
    (ask_is_colour, 0.8),
    (ask_bigger, 1.4),
    (ask_extreme, 0.8),
    (ask_relation, 1.6),
    (ask_missing, 0.5),
    (ask_digit, 6.0),
    (ask_digit_more, 3.0),
    (ask_unknowable, 0.4),
)


def pick(
    rng: random.Random, scene: Scene, table: Sequence[tuple[Ask, float]] = IMAGE_QUESTIONS
) -> Turn:
    """A random question that the scene answers."""
    asks, weights = zip(*table, strict=True)
    while True:
        turn: Turn | None = rng.choices(asks, weights)[0](rng, scene)
        if turn is not None:
            return Turn(turn.kind, casual(rng, turn.question), turn.answer)


def follow_up(rng: random.Random, scene: Scene) -> list[Turn]:
    """A colour or position question and "And the ...?" about another shape; [] if impossible."""
    kinds = [thing.kind for thing in scene.things]
    unique = [thing for thing in _shapes(scene) if kinds.count(thing.kind) == 1]
    if len(unique) < 2:
        return []
    one, two = rng.sample(unique, 2)
    again = rng.choice((f"And the {two.kind}?", f"What about the {two.kind}?"))
    if rng.random() < 0.5:
        first = Turn("colour", f"What {color(rng)} is the {one.kind}?", sentence(one.colour))
        return [first, Turn("follow-up", again, sentence(two.colour))]
    places = []
    for thing in (one, two):
        place = PLACES[thing.row, thing.column]
        places.append("In the middle." if place == "middle" else f"At the {place}.")
    first = Turn("position", f"Where is the {one.kind}?", places[0])
    return [first, Turn("follow-up", again, places[1])]


def picture_turns(rng: random.Random, scene: Scene, count: int) -> list[Turn]:
    """A conversation about one picture: `count` questions and a description."""
    turns = [pick(rng, scene) for _ in range(count)]
    if rng.random() < 0.35 and count >= 2:
        turns[:2] = follow_up(rng, scene) or turns[:2]
    described = ask_caption(rng, scene)
    assert described is not None
    described = Turn(described.kind, casual(rng, described.question), described.answer)
    place = len(turns) if rng.random() < 0.7 else rng.choice((0, 0, rng.randrange(len(turns))))
    if place == 1 and turns[1].kind == "follow-up":
        place = 0
    turns.insert(place, described)
    return turns
