"""Synthetic videos of 4 to 8 seconds, and the questions about them.

A video is two sampled frames per second, so that a temporal patch (two frames) is one second.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from demo_questions import (
    NUMBERS,
    Turn,
    ask_unknowable,
    casual,
    color,
    named,
    sentence,
    with_article,
)
from demo_scenes import (
    COLOURS,
    SHAPES,
    Background,
    Thing,
    draw_thing,
    random_background,
    render_background,
)
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

    @property
    def direction(self) -> str:
        across, down = self.travel
        if abs(across) > abs(down):
            return "left" if across < 0 else "right"
        return "up" if down < 0 else "down"


def draw_clip(rng: random.Random) -> Clip:
    """A random clip of one of four stories."""
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
    """Frames of the whole video at its own rate."""
    return clip.seconds * clip.frame_rate


def sampled_frames(clip: Clip) -> list[int]:
    """Indices that the video processor samples: evenly over the whole length, two a second."""
    wanted = min(int(clip.seconds * SAMPLE_RATE), frame_count(clip))
    return [int(i) for i in np.linspace(0, frame_count(clip) - 1, wanted).round()]


def visible(clip: Clip, frame: int) -> Thing | None:
    """The thing that frame `frame` (at the clip's own rate) shows, where it is then."""
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
    """The given frames as RGB pictures."""
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


AskClip = Callable[[random.Random, Clip], Turn]


def _motion_turn(rng: random.Random, clip: Clip) -> Turn:
    thing = clip.things[0]
    wordings = [
        f"Which way does the {thing.kind} move?",
        f"In which direction does the {thing.kind} move?",
        f"Where does the {thing.kind} move?",
        f"Which way does the {thing.colour} shape move?",
        "What is the direction of the motion?",
        "In which direction does it move?",
    ]
    return Turn("direction", rng.choice(wordings), _direction(clip))


def _direction(clip: Clip) -> str:
    way = clip.direction
    return f"To the {way}." if way in ("left", "right") else sentence(way)


def _still_colour_turn(rng: random.Random, clip: Clip) -> Turn:
    thing = clip.things[0]
    if rng.random() < 0.5:
        question = f"What {color(rng)} is the {thing.kind}?"
        return Turn("video colour", question, sentence(thing.colour))
    question = rng.choice(("Which shape moves?", "What shape moves?"))
    return Turn("video shape", question, sentence(with_article(thing.kind)))


def _changes_turn(rng: random.Random, clip: Clip) -> Turn:
    question = f"Does the {clip.things[0].kind} change its {color(rng)}?"
    return Turn("video yes or no", question, "Yes." if clip.story == "change" else "No.")


def _when_turn(rng: random.Random, clip: Clip) -> Turn:
    kind = clip.things[0].kind
    wordings = (
        f"When does the {color(rng)} change?",
        f"When does the {kind} change its {color(rng)}?",
        f"At which second does the {color(rng)} change?",
        f"At what time does the {color(rng)} change?",
    )
    return Turn("when", rng.choice(wordings), f"At second {clip.moments[0]}.")


def _half_turn(rng: random.Random, clip: Clip) -> Turn:
    moment, middle = clip.moments[0], clip.seconds / 2
    if abs(moment - middle) < 0.6:
        return _when_turn(rng, clip)
    halves = ["first", "second"]
    rng.shuffle(halves)
    question = f"Does the {color(rng)} change in the {halves[0]} or in the {halves[1]} half?"
    half = "first" if moment < middle else "second"
    return Turn("which half", question, f"In the {half} half.")


def _ends_turn(rng: random.Random, clip: Clip) -> Turn:
    before, after = clip.things
    if rng.random() < 0.5:
        where, thing = rng.choice(("at the start", "at first", "at the beginning")), before
    else:
        where, thing = rng.choice(("at the end", "in the end")), after
    question = f"What {color(rng)} is the {thing.kind} {where}?"
    return Turn("colour at start or end", question, sentence(thing.colour))


def _turns_into(rng: random.Random, clip: Clip) -> Turn:
    question = rng.choice(
        (
            f"Which {color(rng)} does the {clip.things[0].kind} turn into?",
            f"What {color(rng)} does the {clip.things[0].kind} become?",
        )
    )
    return Turn("colour at start or end", question, sentence(clip.things[1].colour))


def _flash_count_turn(rng: random.Random, clip: Clip) -> Turn:
    wordings = (
        "How many flashes are there?",
        "How many flashes do you see?",
        "How many times does it flash?",
        "Count the flashes.",
        "How often does the light flash?",
    )
    return Turn("flashes", rng.choice(wordings), NUMBERS[len(clip.moments)] + ".")


def _flash_colour_turn(rng: random.Random, clip: Clip) -> Turn:
    question = rng.choice((f"What {color(rng)} are the flashes?", f"What {color(rng)} flashes?"))
    return Turn("video colour", question, sentence(clip.things[0].colour))


def _first_flash_turn(rng: random.Random, clip: Clip) -> Turn:
    question = rng.choice(("When is the first flash?", "At which second is the first flash?"))
    return Turn("when", question, f"At second {clip.moments[0]}.")


def _first_last_turn(rng: random.Random, clip: Clip) -> Turn:
    which = rng.choice(("first", "last"))
    thing = clip.things[0 if which == "first" else -1]
    wordings = [
        f"Which object is shown {which}?",
        f"Which object appears {which}?",
        f"What is the {which} object?",
        f"Which shape comes {which}?",
        f"What do you see {which}?",
    ]
    return Turn(f"{which} object", rng.choice(wordings), sentence(with_article(named(thing))))


def _sequence_count_turn(rng: random.Random, clip: Clip) -> Turn:
    what = rng.choice(("objects", "shapes", "things"))
    question = rng.choice((f"How many {what} appear?", f"How many {what} are shown?"))
    return Turn("video count", question, NUMBERS[len(clip.things)] + ".")


def _sequence_yes_no(rng: random.Random, clip: Clip) -> Turn:
    asked = rng.choice(clip.things)
    kind, colour = asked.kind, asked.colour
    if rng.random() < 0.5:
        colour = rng.choice(tuple(COLOURS))
    there = any((t.kind, t.colour) == (kind, colour) for t in clip.things)
    question = f"Is there {with_article(f'{colour} {kind}')} in the video?"
    return Turn("video yes or no", question, "Yes." if there else "No.")


def _clip_refusal(rng: random.Random, clip: Clip) -> Turn:
    del clip
    turn = ask_unknowable(rng)
    assert turn is not None
    return turn


CLIP_QUESTIONS: dict[str, tuple[tuple[AskClip, float], ...]] = {
    "motion": (
        (_motion_turn, 3.0),
        (_still_colour_turn, 1.0),
        (_changes_turn, 0.5),
        (_clip_refusal, 0.1),
    ),
    "change": (
        (_when_turn, 2.0),
        (_half_turn, 1.0),
        (_ends_turn, 2.0),
        (_turns_into, 0.7),
        (_changes_turn, 0.4),
        (_clip_refusal, 0.1),
    ),
    "flashes": (
        (_flash_count_turn, 3.0),
        (_flash_colour_turn, 1.0),
        (_first_flash_turn, 0.8),
        (_clip_refusal, 0.1),
    ),
    "sequence": (
        (_first_last_turn, 3.0),
        (_sequence_count_turn, 1.0),
        (_sequence_yes_no, 0.8),
        (_clip_refusal, 0.1),
    ),
}


def clip_caption(clip: Clip) -> str:
    """What happens in the video."""
    thing = clip.things[0]
    if clip.story == "motion":
        way = clip.direction
        where = f"to the {way}" if way in ("left", "right") else way
        return sentence(f"{with_article(named(thing))} moves {where}")
    if clip.story == "change":
        turned = f"turns {clip.things[1].colour} at second {clip.moments[0]}"
        return sentence(f"{with_article(named(thing))} {turned}")
    if clip.story == "flashes":
        seconds = ", ".join(str(moment) for moment in clip.moments)
        what = "flash" if len(clip.moments) == 1 else "flashes"
        return f"{NUMBERS[len(clip.moments)]} {thing.colour} {what}, at second {seconds}."
    parts = [
        f"{with_article(named(thing))} at second {moment}"
        for thing, moment in zip(clip.things, clip.moments, strict=True)
    ]
    return sentence(", then ".join(parts))


def pick_clip(rng: random.Random, clip: Clip) -> Turn:
    """A random question that the clip answers."""
    asks, weights = zip(*CLIP_QUESTIONS[clip.story], strict=True)
    turn: Turn = rng.choices(asks, weights)[0](rng, clip)
    return Turn(turn.kind, casual(rng, turn.question), turn.answer)


def clip_turns(rng: random.Random, clip: Clip, count: int) -> list[Turn]:
    """A conversation about one video: `count` questions and a description."""
    turns = [pick_clip(rng, clip) for _ in range(count)]
    wordings = ("Describe the video.", "What happens in the video?", "What happens?")
    described = Turn("video description", casual(rng, rng.choice(wordings)), clip_caption(clip))
    turns.insert(len(turns) if rng.random() < 0.6 else 0, described)
    return turns
