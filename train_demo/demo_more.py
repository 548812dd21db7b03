"""Further questions about one picture, in the words that newcomers use."""

from __future__ import annotations

import random

from demo_fields import colours_of
from demo_lookups import Ask
from demo_questions import caption, pick
from demo_scenes import DIGITS, Background, Scene, draw_scene
from demo_words import (
    PLACES,
    UNREADABLE,
    Turn,
    casual,
    color,
    is_where,
    named,
    noun,
    sentence,
    with_article,
)


def ask_colours(rng: random.Random, scene: Scene) -> Turn | None:
    word = color(rng) + "s"
    wordings = (
        f"Which {word} do you see?",
        f"What {word} do you see?",
        f"Which {word} are there?",
        f"What {word} are in the {noun(rng)}?",
        f"Which {word} are in this {noun(rng)}?",
        f"List the {word}.",
        f"{word.capitalize()}?",
    )
    return Turn("colours", rng.choice(wordings), sentence(", ".join(colours_of(scene))))


def ask_shapes(rng: random.Random, scene: Scene) -> Turn | None:
    if scene.things[0].kind in DIGITS:
        return None
    wordings = (
        "Which shapes do you see?",
        "What shapes do you see?",
        "Which shapes are there?",
        f"What shapes are in the {noun(rng)}?",
        "List the shapes.",
        "Shapes?",
    )
    said = ", ".join(with_article(thing.kind) for thing in scene.reading_order)
    return Turn("shapes", rng.choice(wordings), sentence(said))


def ask_single(rng: random.Random, scene: Scene) -> Turn | None:
    if len(scene.things) > 1:
        return None
    thing = scene.things[0]
    name = "digit" if thing.kind in DIGITS else thing.kind
    questions = [
        ("What is this?", sentence(with_article(named(thing)))),
        ("What's this?", sentence(with_article(named(thing)))),
        ("Where is it?", is_where(name, PLACES[thing.row, thing.column])),
        (f"What {color(rng)} is it?", sentence(thing.colour)),
        (f"{color(rng).capitalize()}?", sentence(thing.colour)),
        (f"Which {color(rng)} is it?", sentence(thing.colour)),
        (f"What {color(rng)} is this?", sentence(thing.colour)),
        (f"What {color(rng)} is the {rng.choice(('shape', 'object'))}?", sentence(thing.colour)),
    ]
    if name == thing.kind:
        questions += [("Shape?", sentence(with_article(thing.kind)))]
    return Turn("one thing", *rng.choice(questions))


def describe_wording(rng: random.Random) -> str:
    """Return one of many ways to ask for a description."""
    what = rng.choice((f"this {noun(rng)}", f"the {noun(rng)}"))
    return rng.choice(
        (
            f"What's in {what}?",
            f"What is in {what}?",
            f"What's on {what}?",
            f"What is shown in {what}?",
            f"What do you see in {what}?",
            f"What can you see in {what}?",
            "What can you see?",
            "What do you see?",
            f"Describe {what} in detail.",
            f"Describe {what} in one sentence.",
            f"Please describe {what}.",
            f"Can you describe {what}?",
            f"Describe {what} briefly.",
            f"Tell me what is in {what}.",
            f"Tell me about {what}.",
            f"Explain {what}.",
            f"Caption {what}.",
            f"Write a caption for {what}.",
            f"Summarize {what}.",
            "Describe it.",
            "What is it?",
        )
    )


def ask_description(rng: random.Random, scene: Scene) -> Turn | None:
    return Turn("description", describe_wording(rng), caption(scene))


MORE_QUESTIONS: tuple[tuple[Ask, float], ...] = (
    (ask_colours, 1.2),
    (ask_shapes, 0.9),
    (ask_single, 1.0),
    (ask_description, 1.2),
)


def more(rng: random.Random, scene: Scene) -> Turn:
    """Return one of these questions."""
    asks, weights = zip(*MORE_QUESTIONS, strict=True)
    while True:
        turn: Turn | None = rng.choices(asks, weights)[0](rng, scene)
        if turn is not None:
            return Turn(turn.kind, casual(rng, turn.question), turn.answer)


def unreadable_scene(rng: random.Random) -> Scene:
    """Return a picture that cannot be read."""
    plain = Background((0, 0, 0), (0, 0, 0), True, 0.0, 0)
    return Scene((), plain, unreadable=rng.randrange(2**31))


def unreadable_turn(question: str) -> Turn:
    return Turn("unreadable", question, UNREADABLE)


def direct(rng: random.Random, scene: Scene) -> Turn:
    """Return a question about a picture, whether it can be read or not."""
    if scene.things:
        return pick(rng, scene) if rng.random() < 0.7 else more(rng, scene)
    other = draw_scene(rng, "train")
    return unreadable_turn((pick if rng.random() < 0.5 else more)(rng, other).question)


def specific(rng: random.Random, scene: Scene) -> Turn:
    """Return a question about a part of a picture, not one that asks for a description."""
    if not scene.things:
        return unreadable_turn(pick(rng, draw_scene(rng, "train")).question)
    while (turn := direct(rng, scene)).kind == "description":
        pass
    return turn
