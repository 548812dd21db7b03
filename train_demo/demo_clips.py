"""Synthetic videos of 4 to 8 seconds.

Videos are sampled at two frames per second, so a temporal patch (two frames) is one second.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
from demo_drawing import draw_thing, render_background
from demo_photos import draw_unreadable
from demo_scenes import COLOURS, SHAPES, Background, Thing, random_background
from PIL import Image

SAMPLE_RATE = 2.0


FRAME_RATES = (2, 2, 4, 5, 8, 10, 12, 15, 24, 25, 30)


FLASH_COLOURS = ("white", "yellow", "red", "green", "blue")


@dataclass(frozen=True)
class Clip:
    """A video before it is drawn: what is visible at each second."""

    story: str
    seconds: int
    frame_rate: int
    background: Background
    things: tuple[Thing, ...]
    """motion: the thing; change: before and after; sequence: in order of appearance; flashes: a
    thing that fills the picture."""
    moments: tuple[int, ...] = ()
    """change: the second of the change; sequence: the second at which each thing appears;
    flashes: the seconds that flash."""
    travel: tuple[float, float] = (0.0, 0.0)
    """motion: how far the thing moves over the whole video, as shares of width and height."""
    unreadable: int | None = None
    """The seed of a picture that all frames show instead, see `demo_photos`."""

    @property
    def direction(self) -> str:
        across, down = self.travel
        if abs(across) > abs(down):
            return "left" if across < 0 else "right"
        return "up" if down < 0 else "down"


def draw_clip(rng: random.Random) -> Clip:
    """Draw a random clip of one of four stories."""
    story = rng.choice((_motion, _change, _flashes, _sequence))
    seconds = rng.randint(4, 8)
    return story(rng, seconds, rng.choice(FRAME_RATES))


def _random_thing(rng: random.Random) -> Thing:
    kind, colour = rng.choice(SHAPES), rng.choice(tuple(COLOURS))
    return Thing(
        kind, colour, rng.uniform(0.35, 0.65), rng.uniform(0.35, 0.65), rng.uniform(0.2, 0.32), True
    )


def _motion(rng: random.Random, seconds: int, rate: int) -> Clip:
    thing = replace(_random_thing(rng), radius=rng.uniform(0.16, 0.24))
    length = rng.uniform(0.4, 0.6) * rng.choice((-1, 1))
    if rng.random() < 0.5:
        travel = (length, 0.0)
        thing = replace(thing, x=0.5 - length / 2)
    else:
        travel = (0.0, length)
        thing = replace(thing, y=0.5 - length / 2)
    background = random_background(rng, {thing.colour})
    return Clip("motion", seconds, rate, background, (thing,), travel=travel)


def _change(rng: random.Random, seconds: int, rate: int) -> Clip:
    before = _random_thing(rng)
    after = replace(before, colour=rng.choice([c for c in COLOURS if c != before.colour]))
    background = random_background(rng, {before.colour, after.colour})
    moment = rng.randint(1, seconds - 1)
    return Clip("change", seconds, rate, background, (before, after), (moment,))


def _flashes(rng: random.Random, seconds: int, rate: int) -> Clip:
    colour = rng.choice(FLASH_COLOURS)
    thing = Thing("square", colour, 0.5, 0.5, 4.0, True)
    background = _dark(rng)
    most = min(4, (seconds + 1) // 2)
    count = rng.randint(1, most)
    while True:
        moments = sorted(rng.sample(range(seconds), count))
        if all(later - sooner > 1 for sooner, later in zip(moments, moments[1:], strict=False)):
            return Clip("flashes", seconds, rate, background, (thing,), tuple(moments))


def _dark(rng: random.Random) -> Background:
    level = rng.randint(5, 45)
    dark = (level, level, level)
    return Background(dark, dark, True, max(0.0, rng.uniform(-8, 10)), rng.randrange(2**31))


def _sequence(rng: random.Random, seconds: int, rate: int) -> Clip:
    count = rng.randint(2, min(4, seconds))
    things: list[Thing] = []
    while len(things) < count:
        thing = _random_thing(rng)
        if all((t.kind, t.colour) != (thing.kind, thing.colour) for t in things[-1:]):
            things.append(thing)
    moments = (0, *sorted(rng.sample(range(1, seconds), count - 1)))
    background = random_background(rng, {thing.colour for thing in things})
    return Clip("sequence", seconds, rate, background, tuple(things), moments)


def frame_count(clip: Clip) -> int:
    """Return the number of frames at the clip's own rate."""
    return clip.seconds * clip.frame_rate


def sampled_frames(clip: Clip) -> list[int]:
    """Return the frames that the video processor samples: evenly, two per second."""
    wanted = min(int(clip.seconds * SAMPLE_RATE), frame_count(clip))
    return [int(i) for i in np.linspace(0, frame_count(clip) - 1, wanted).round()]


def visible(clip: Clip, frame: int) -> Thing | None:
    """Return the thing in frame `frame` (at the clip's own rate), at its place in that frame."""
    time = frame / clip.frame_rate
    if clip.story == "motion":
        share = frame / (frame_count(clip) - 1)
        thing, (across, down) = clip.things[0], clip.travel
        return replace(thing, x=thing.x + across * share, y=thing.y + down * share)
    if clip.story == "change":
        return clip.things[time >= clip.moments[0]]
    if clip.story == "flashes":
        return clip.things[0] if int(time) in clip.moments else None
    shown = sum(time >= moment for moment in clip.moments) - 1
    return clip.things[shown]


def render_clip(clip: Clip, frames: list[int], height: int, width: int) -> list[Image.Image]:
    """Draw the given frames as RGB pictures."""
    if clip.unreadable is not None:
        return [draw_unreadable(clip.unreadable, height, width)] * len(frames)
    background = render_background(clip.background, height, width)
    pictures: list[Image.Image] = []
    shown: list[Thing | None] = []
    for frame in frames:
        thing = visible(clip, frame)
        if shown and thing == shown[-1]:
            pictures.append(pictures[-1])
        else:
            picture = background.copy()
            if thing is not None:
                draw_thing(picture, thing)
            pictures.append(picture)
        shown.append(thing)
    return pictures
