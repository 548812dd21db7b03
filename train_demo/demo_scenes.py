"""Synthetic pictures: a few coloured shapes, or one handwritten digit, on a varied background.

All results depend on the given random generator alone.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

RGB = tuple[int, int, int]


COLOURS: dict[str, RGB] = {
    "red": (222, 32, 32),
    "green": (36, 160, 58),
    "blue": (38, 76, 226),
    "yellow": (246, 222, 40),
    "orange": (250, 138, 18),
    "purple": (152, 48, 192),
    "white": (250, 250, 250),
    "black": (14, 14, 14),
}


SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")


DIGITS = tuple(str(digit) for digit in range(10))


KINDS = SHAPES + DIGITS


# Where the centre of a thing lies on one axis, as a share of the picture's side. The gaps between
# the three ranges are the margin that keeps "left", "middle" and "right" unambiguous.
AXIS_RANGES = {"low": (0.18, 0.32), "mid": (0.47, 0.53), "high": (0.68, 0.82)}


TRAIN_DIGITS = 1500


@dataclass(frozen=True)
class Hand:
    """Changes to a scanned digit: rotation (degrees), slant, stretch (width, height) and the grey
    at which its ink begins."""

    angle: float = 0.0
    slant: float = 0.0
    stretch: tuple[float, float] = (1.0, 1.0)
    ink: int = 40


@dataclass(frozen=True)
class Thing:
    """One drawn object. Lengths are fractions: x of the width, y of the height, radius of the
    shorter side."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float
    big: bool
    glyph: int = 0
    angle: float = 0.0
    hand: Hand = Hand()

    @property
    def column(self) -> str:
        return _axis_name(self.x)

    @property
    def row(self) -> str:
        return _axis_name(self.y)


@dataclass(frozen=True)
class Background:
    """Two colours of a gradient, its direction and the strength of blocky noise."""

    first: RGB
    second: RGB
    vertical: bool
    noise: float
    noise_seed: int


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn."""

    things: tuple[Thing, ...]
    background: Background
    unreadable: int | None = None
    """The seed of a picture without things, see `demo_photos`."""

    @property
    def reading_order(self) -> tuple[Thing, ...]:
        rank = {"low": 0, "mid": 1, "high": 2}
        return tuple(sorted(self.things, key=lambda thing: (rank[thing.row], rank[thing.column])))


def _axis_name(share: float) -> str:
    return "low" if share < 0.4 else "high" if share > 0.6 else "mid"


def draw_scene(rng: random.Random, split: str, *, things: int | None = None) -> Scene:
    """Draw a scene of 1-4 shapes, or (one in five) of one digit.

    `split` is "train" or "test"; their digits come from different writers.
    """
    if things is None and rng.random() < 0.2:
        return with_background(rng, (random_digit(rng, split),))
    count = things or rng.choices((1, 2, 3, 4), (0.3, 0.25, 0.25, 0.2))[0]
    if count == 1:
        return with_background(rng, (random_single(rng),))
    return with_background(rng, random_group(rng, count))


def random_single(rng: random.Random) -> Thing:
    """Draw a single shape: anywhere, and large if it is in the middle."""
    column, row = rng.choice(tuple(AXIS_RANGES)), rng.choice(tuple(AXIS_RANGES))
    if rng.random() < 0.3:
        column = row = "mid"
    radius = rng.uniform(0.13, 0.40 if column == row == "mid" else 0.19)
    return _thing(rng, rng.choice(SHAPES), rng.choice(tuple(COLOURS)), (column, row), radius)


def random_digit(rng: random.Random, split: str) -> Thing:
    """Draw a handwritten digit, mostly in the middle."""
    labels = digits()[1]
    start, end = (0, TRAIN_DIGITS) if split == "train" else (TRAIN_DIGITS, len(labels))
    glyph = rng.randrange(start, end)
    column = row = "mid"
    if rng.random() < 0.3:
        column, row = rng.choice(tuple(AXIS_RANGES)), rng.choice(tuple(AXIS_RANGES))
    radius = rng.uniform(0.25, 0.42) if column == row == "mid" else rng.uniform(0.17, 0.19)
    thing = _thing(rng, str(labels[glyph]), rng.choice(tuple(COLOURS)), (column, row), radius)
    # Only training varies the handwriting, since it has few writers.
    return replace(thing, glyph=glyph, hand=_random_hand(rng) if split == "train" else Hand())


def _random_hand(rng: random.Random) -> Hand:
    return Hand(
        angle=rng.uniform(-13, 13),
        slant=rng.uniform(-0.25, 0.25),
        stretch=(rng.uniform(0.85, 1.2), rng.uniform(0.85, 1.15)),
        ink=rng.randint(15, 70),
    )


def random_group(rng: random.Random, count: int) -> tuple[Thing, ...]:
    """Draw two to four separate shapes; no two share kind *and* colour."""
    while True:
        group = _group(rng, count)
        if all(not _touch(a, b) for i, a in enumerate(group) for b in group[:i]):
            return group


def _touch(a: Thing, b: Thing) -> bool:
    """Return True if two things would touch in a square picture."""
    return math.hypot(a.x - b.x, a.y - b.y) < 1.02 * (a.radius + b.radius)


def _group(rng: random.Random, count: int) -> tuple[Thing, ...]:
    columns: tuple[str, ...] = tuple(AXIS_RANGES)
    sizes = ((0.11, 0.12), (0.16, 0.17))
    if rng.random() < 0.5:
        columns, sizes = ("low", "high"), ((0.115, 0.135), (0.175, 0.195))
    cells = rng.sample([(column, row) for column in columns for row in columns], count)
    few = rng.random() < 0.25
    kinds = rng.sample(SHAPES, 2) if few else list(SHAPES)
    colours = rng.sample(tuple(COLOURS), 2) if few and rng.random() < 0.5 else list(COLOURS)
    pairs = rng.sample([(kind, colour) for kind in kinds for colour in colours], count)
    things = []
    for cell, (kind, colour) in zip(cells, pairs, strict=True):
        big = rng.random() < 0.5
        radius = rng.uniform(*sizes[big])
        things.append(_thing(rng, kind, colour, cell, radius, big=big, jitter=0.25))
    return tuple(things)


def _thing(
    rng: random.Random,
    kind: str,
    colour: str,
    cell: tuple[str, str],
    radius: float,
    *,
    big: bool = True,
    jitter: float = 1.0,
) -> Thing:
    """Draw a thing in a cell; `jitter` is the used fraction of the cell's range."""
    x, y = (_within(rng, AXIS_RANGES[name], jitter) for name in cell)
    return Thing(kind, colour, x, y, radius, big, angle=rng.uniform(-10, 10))


def _within(rng: random.Random, bounds: tuple[float, float], share: float) -> float:
    low, high = bounds
    middle = (low + high) / 2
    return rng.uniform(middle - (high - low) / 2 * share, middle + (high - low) / 2 * share)


def with_background(rng: random.Random, things: tuple[Thing, ...]) -> Scene:
    """Put things on a background that contrasts with all of them."""
    used = {thing.colour for thing in things}
    return Scene(things, random_background(rng, used))


def random_background(rng: random.Random, used: set[str]) -> Background:
    """Choose white, black, or a dull colour or gradient, far from every used colour."""
    colours = [COLOURS[name] for name in used]
    plain = rng.random()
    if plain < 0.2 and "white" not in used:
        first = second = (255, 255, 255)
    elif plain > 0.9 and "black" not in used:
        first = second = (0, 0, 0)
    else:
        first = _dull_colour(rng, colours)
        near = max(0.0, rng.uniform(-0.7, 1))
        other = _dull_colour(rng, colours)
        mixed = [round(a + (b - a) * near) for a, b in zip(first, other, strict=True)]
        second = (mixed[0], mixed[1], mixed[2])
        if any(_distance(second, colour) < 110 for colour in colours):
            second = first
    noise = max(0.0, rng.uniform(-8, 14))
    return Background(first, second, rng.random() < 0.5, noise, rng.randrange(2**31))


def _dull_colour(rng: random.Random, avoid: list[RGB]) -> RGB:
    for _ in range(100):
        level = rng.uniform(30, 225)
        tint = rng.choice((8, 8, 25))
        found = [min(255, max(0, round(level + rng.uniform(-tint, tint)))) for _ in range(3)]
        colour = (found[0], found[1], found[2])
        if all(_distance(colour, other) >= 110 for other in avoid):
            return colour
    return (128, 128, 128)


def _distance(a: RGB, b: RGB) -> float:
    return math.dist(a, b)


def random_size(rng: random.Random) -> tuple[int, int]:
    """Draw the size (height, width) of a picture, 64 to 640 pixels, mostly small."""
    base = round(math.exp(rng.uniform(math.log(64), math.log(640))))
    ratio = math.exp(rng.uniform(-0.65, 0.65)) if rng.random() < 0.5 else 1.0
    height = round(base * math.sqrt(ratio))
    width = round(base / math.sqrt(ratio))
    return min(640, max(64, height)), min(640, max(64, width))


@functools.cache
def digits() -> tuple[Any, Any]:
    """Return scikit-learn's digits: images uint8 [1797, 8, 8] of 0-255, labels [1797]."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.images * (255 / 16)).round().astype(np.uint8), data.target
