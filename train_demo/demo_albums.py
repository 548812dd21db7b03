"""Questions about two or three pictures in one conversation."""

from __future__ import annotations

import random
from collections.abc import Callable

from demo_drills import album_drills
from demo_scenes import COLOURS, SHAPES, Scene, Thing, random_digit, random_single, with_background
from demo_words import (
    NUMBERS,
    ORDINALS,
    Turn,
    casual,
    color,
    is_so,
    named,
    noun,
    sentence,
    with_article,
)

Album = tuple[Scene, ...]
AskAlbum = Callable[[random.Random, Album], Turn | None]


def draw_album(rng: random.Random, split: str, count: int) -> Album:
    """Draw pictures of one thing each; no two show the same colour and kind."""
    things: list[Thing] = []
    while len(things) < count:
        thing = random_digit(rng, split) if rng.random() < 0.12 else random_single(rng)
        if rng.random() < 0.2 and things and thing.kind in SHAPES:
            thing = _like(rng, thing, things[-1])
        if all((thing.kind, thing.colour) != (other.kind, other.colour) for other in things):
            things.append(thing)
    return tuple(with_background(rng, (thing,)) for thing in things)


def _like(rng: random.Random, thing: Thing, other: Thing) -> Thing:
    """Give `thing` the kind or the colour of `other`, for hard negatives."""
    if rng.random() < 0.5 and other.kind in SHAPES:
        return Thing(other.kind, thing.colour, thing.x, thing.y, thing.radius, thing.big)
    return Thing(thing.kind, other.colour, thing.x, thing.y, thing.radius, thing.big)


def _things(album: Album) -> list[Thing]:
    return [scene.things[0] for scene in album]


def ask_which(rng: random.Random, album: Album) -> Turn | None:
    things = _things(album)
    place = rng.randrange(len(things))
    thing = things[place]
    options = [f"the {named(thing)}"]
    if sum(other.kind == thing.kind for other in things) == 1:
        options += [f"the {thing.kind}", with_article(thing.kind)]
    if sum(other.colour == thing.colour for other in things) == 1 and thing.kind in SHAPES:
        options += [f"a {thing.colour} shape" if thing.colour != "orange" else "an orange shape"]
    what = rng.choice(options)
    answer = "The " + what.split(" ", 1)[1]
    wordings = (
        f"Which {noun(rng)} has {what}?",
        f"Which {noun(rng)} shows {what}?",
        f"In which {noun(rng)} is {what}?",
    )
    return Turn("which picture", rng.choice(wordings), f"{answer} is in the {ORDINALS[place]}.")


def ask_what(rng: random.Random, album: Album) -> Turn | None:
    things = _things(album)
    place = rng.randrange(len(things))
    where = f"the {ORDINALS[place]} {noun(rng)}"
    wordings = (f"What is in {where}?", f"What does {where} show?", f"Describe {where}.")
    answer = sentence(with_article(named(things[place])))
    return Turn("what is in which", rng.choice(wordings), answer)


def ask_colour_in(rng: random.Random, album: Album) -> Turn | None:
    things = _things(album)
    place = rng.randrange(len(things))
    thing = things[place]
    where = f"the {ORDINALS[place]} {noun(rng)}"
    if rng.random() < 0.5 and thing.kind in SHAPES:
        question = rng.choice((f"Which shape is in {where}?", f"What shape is in {where}?"))
        return Turn("shape in which", question, sentence(with_article(thing.kind)))
    name = thing.kind if thing.kind in SHAPES else "digit"
    question = f"What {color(rng)} is the {name} in {where}?"
    return Turn("colour in which", question, sentence(thing.colour))


def ask_exists_in(rng: random.Random, album: Album) -> Turn | None:
    things = _things(album)
    place = rng.randrange(len(things))
    right = things[place]
    if right.kind not in SHAPES:
        return None
    wrong = rng.choice([t for t in things if t is not right and t.kind in SHAPES] or [right])
    asked = rng.choice((right, wrong))
    kind, colour = asked.kind, asked.colour
    if rng.random() < 0.2:
        colour = rng.choice(tuple(COLOURS))
    there = (kind, colour) == (right.kind, right.colour)
    what = with_article(f"{colour} {kind}")
    question = f"Is there {what} in the {ORDINALS[place]} {noun(rng)}?"
    where = f"{what} in the {ORDINALS[place]}"
    return Turn("yes or no in which", question, is_so(where, there))


def ask_how_many(rng: random.Random, album: Album) -> Turn | None:
    word = noun(rng) + "s"
    question = rng.choice((f"How many {word} are there?", f"How many {word} do you see?"))
    return Turn("how many pictures", question, NUMBERS[len(album)] + ".")


ALBUM_QUESTIONS: tuple[tuple[AskAlbum, float], ...] = (
    (ask_which, 3.0),
    (ask_what, 2.0),
    (ask_colour_in, 2.0),
    (ask_exists_in, 1.5),
    (ask_how_many, 0.4),
)


def pick_album(rng: random.Random, album: Album) -> Turn:
    """Return a random question that the pictures answer."""
    asks, weights = zip(*ALBUM_QUESTIONS, strict=True)
    while True:
        turn: Turn | None = rng.choices(asks, weights)[0](rng, album)
        if turn is not None:
            return Turn(turn.kind, casual(rng, turn.question), turn.answer)


def album_turns(rng: random.Random, album: Album, count: int) -> list[Turn]:
    """Return a training conversation about pictures: `count` questions, a description, drills."""
    turns = [pick_album(rng, album) for _ in range(count)]
    parts = [
        f"the {ORDINALS[i]} shows {with_article(named(thing))}"
        for i, thing in enumerate(_things(album))
    ]
    question = casual(rng, f"Describe the {noun(rng)}s.")
    described = Turn("description", question, sentence(", ".join(parts)))
    turns.insert(len(turns) if rng.random() < 0.7 else 0, described)
    return [*turns, *album_drills(rng, album)]
