"""Conversations about pictures: the mix of questions, descriptions and refusals."""

from __future__ import annotations

import random
from collections.abc import Sequence

from demo_checks import (
    ask_bigger,
    ask_count,
    ask_count_some,
    ask_exists,
    ask_extreme,
    ask_is_colour,
)
from demo_drills import picture_drills
from demo_lookups import (
    Ask,
    ask_colour,
    ask_digit,
    ask_digit_more,
    ask_missing,
    ask_shape,
    ask_side,
    ask_what_where,
    ask_where,
    shapes_of,
)
from demo_scenes import Scene
from demo_words import (
    PLACES,
    REFUSAL,
    Turn,
    casual,
    color,
    is_colour,
    is_where,
    named,
    noun,
    sentence,
    with_article,
)


def caption(scene: Scene) -> str:
    """Describe the picture in reading order."""
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
    (ask_colour, 2.5),
    (ask_shape, 1.6),
    (ask_what_where, 1.2),
    (ask_count, 1.2),
    (ask_count_some, 1.5),
    (ask_where, 2.2),
    (ask_side, 1.0),
    (ask_exists, 2.2),
    (ask_is_colour, 1.0),
    (ask_bigger, 1.2),
    (ask_extreme, 0.8),
    (ask_missing, 0.7),
    (ask_digit, 6.0),
    (ask_digit_more, 3.0),
    (ask_unknowable, 0.4),
)


def pick(
    rng: random.Random, scene: Scene, table: Sequence[tuple[Ask, float]] = IMAGE_QUESTIONS
) -> Turn:
    """Return a random question that the scene answers."""
    asks, weights = zip(*table, strict=True)
    while True:
        turn: Turn | None = rng.choices(asks, weights)[0](rng, scene)
        if turn is not None:
            return Turn(turn.kind, casual(rng, turn.question), turn.answer)


def follow_up(rng: random.Random, scene: Scene) -> list[Turn]:
    """Return a colour or place question and "And the ...?" about another shape, or []."""
    kinds = [thing.kind for thing in scene.things]
    unique = [thing for thing in shapes_of(scene) if kinds.count(thing.kind) == 1]
    if len(unique) < 2:
        return []
    one, two = rng.sample(unique, 2)
    again = rng.choice((f"And the {two.kind}?", f"What about the {two.kind}?"))
    if rng.random() < 0.5:
        first = Turn("colour", f"What {color(rng)} is the {one.kind}?", is_colour(one))
        return [first, Turn("follow-up", again, is_colour(two))]
    places = []
    for thing in (one, two):
        places.append(is_where(thing.kind, PLACES[thing.row, thing.column]))
    first = Turn("position", f"Where is the {one.kind}?", places[0])
    return [first, Turn("follow-up", again, places[1])]


def picture_turns(rng: random.Random, scene: Scene, count: int) -> list[Turn]:
    """Return a training conversation about a picture: `count` questions, a description, drills."""
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
    return [*turns, *picture_drills(rng, scene)]
