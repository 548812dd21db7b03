"""Questions about videos."""

from __future__ import annotations

import random
from collections.abc import Callable

from demo_clips import Clip
from demo_drills import clip_drills
from demo_questions import ask_unknowable
from demo_scenes import COLOURS
from demo_words import NUMBERS, Turn, casual, color, is_colour, is_so, named, sentence, with_article

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
        return Turn("video colour", question, is_colour(thing))
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
    what = with_article(f"{colour} {kind}")
    return Turn("video yes or no", f"Is there {what} in the video?", is_so(what, there))


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
        (_half_turn, 0.6),
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
    """Describe the events of the video."""
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
    """Return a random question that the clip answers."""
    asks, weights = zip(*CLIP_QUESTIONS[clip.story], strict=True)
    turn: Turn = rng.choices(asks, weights)[0](rng, clip)
    return Turn(turn.kind, casual(rng, turn.question), turn.answer)


def clip_turns(rng: random.Random, clip: Clip, count: int) -> list[Turn]:
    """Return a training conversation about a video: `count` questions, a description, drills."""
    turns = [pick_clip(rng, clip) for _ in range(count)]
    wordings = ("Describe the video.", "What happens in the video?", "What happens?")
    described = Turn("video description", casual(rng, rng.choice(wordings)), clip_caption(clip))
    turns.insert(len(turns) if rng.random() < 0.6 else 0, described)
    return [*turns, *clip_drills(rng, clip)]
