"""Words and sentences of questions and answers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from demo_scenes import Thing

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


UNREADABLE = "I cannot read this picture. I know drawn shapes and digits."


MEDIA_HERE = "\0"


@dataclass(frozen=True)
class Turn:
    """One question, its answer and its kind for accuracy by kind.

    Where the question contains `MEDIA_HERE`, its media come there.
    """

    kind: str
    question: str
    answer: str
    parts: tuple[str, ...] = ()
    given: frozenset[int] = frozenset()
    """Training only: the answer in parts, and which of them are not learned, because nobody could
    know them."""

    @property
    def pieces(self) -> tuple[str, ...]:
        """Return the units of learning: the parts, or the answer as a whole."""
        return self.parts or (self.answer,)


def color(rng: random.Random) -> str:
    """Return one of the two spellings."""
    return rng.choice(("color", "colour"))


def noun(rng: random.Random) -> str:
    return rng.choice(("picture", "picture", "image", "photo"))


def with_article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def named(thing: Thing) -> str:
    """Return colour and kind: "red star", "blue 7"."""
    return f"{thing.colour} {thing.kind}"


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def casual(rng: random.Random, question: str) -> str:
    """Drop the capital, the question mark or both now and then, as people do."""
    style = rng.random()
    if style < 0.08:
        question = question[0].lower() + question[1:]
    if 0.04 < style < 0.12:
        question = question.rstrip("?.")
    return question


def is_colour(thing: Thing) -> str:
    """Return an answer that names the thing right before its colour, for a second lookup."""
    return f"The {thing.kind} is {thing.colour}."


def is_where(name: str, place: str) -> str:
    """Return such an answer for a place."""
    return f"The {name} is {'in' if place == 'middle' else 'at'} the {place}."


def is_so(what: str, true: bool) -> str:
    """Return such an answer for yes and no, as in "A red star: yes"."""
    return sentence(f"{what}: {yes_no(true)}")


def yes_no(true: bool) -> str:
    return "yes" if true else "no"


def plural(kind: str) -> str:
    return "crosses" if kind == "cross" else f"{kind}s"


def is_missing(name: str) -> str:
    return f"The {name} is not there."
