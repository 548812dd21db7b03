"""Turns for training only, with many lookups in few tokens.

A question costs some twenty tokens and teaches one lookup. A roster describes all shapes in a fixed
order. A drill describes random things ("The red star: yes, blue cross: no"); only the descriptions
are learned. In both, the name stands right where its lookup starts. That made lookups by name
learnable at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from demo_clips import Clip, visible
from demo_scenes import COLOURS, DIGITS, KINDS, SHAPES, Scene, Thing
from demo_words import NUMBERS, ORDINALS, PLACES, Turn, color, named, noun, plural, yes_no

Item = tuple[str, str]
"""A name and what is said of it."""
ITEMS = 7


def drill(question: str, items: Sequence[Item]) -> Turn:
    """Return "The star: yes, red cross: no."; the names are given, not learned."""
    parts = [part for name, says in items for part in (f", {name}:", f" {says}")]
    parts[0] = f"The {items[0][0]}:"
    parts[-1] += "."
    given = frozenset(range(0, len(parts), 2))
    return Turn("drill", question, "".join(parts), tuple(parts), given)


def roster(question: str, says: Callable[[str], list[str]]) -> Turn:
    """Return the description by `says` of each kind of shape, or "no"."""
    parts = [f"{kind}: {' and '.join(says(kind)) or 'no'}" for kind in SHAPES]
    return Turn("roster", question, f"The {', '.join(parts)}.")


def picture_drills(rng: random.Random, scene: Scene) -> list[Turn]:
    """Return training turns about one picture."""
    if scene.things[0].kind in DIGITS:
        return [_which_digit(rng, scene.things[0].kind)]
    asked = [_there, _there, _places, _counts]
    if len({thing.big for thing in scene.things}) == 2:
        asked += [_bigger, _bigger]
    return [_picture_roster(rng, scene), rng.choice(asked)(rng, scene.things)]


def _picture_roster(rng: random.Random, scene: Scene) -> Turn:
    style = rng.choice(("colour", "place", "size" if len(scene.things) > 1 else "colour"))
    question = {
        "colour": f"What {color(rng)} is each shape?",
        "place": "Where is each shape?",
        "size": "How big is each shape?",
    }[style]

    def says(kind: str) -> list[str]:
        found = [thing for thing in scene.reading_order if thing.kind == kind]
        return {
            "colour": [thing.colour for thing in found],
            "place": [PLACES[thing.row, thing.column] for thing in found],
            "size": ["bigger" if thing.big else "smaller" for thing in found],
        }[style]

    return roster(question, says)


def _which_digit(rng: random.Random, digit: str) -> Turn:
    asked = rng.sample(DIGITS, 5)
    if digit not in asked:
        asked[rng.randrange(5)] = digit
    return drill("Which digit is it?", [(d, yes_no(d == digit)) for d in asked])


def some_names(rng: random.Random, things: Sequence[Thing]) -> list[tuple[str, list[Thing]]]:
    """Return names of things, half of them shown, with the things of each name."""
    names: dict[str, list[Thing]] = {}
    shown = [thing for thing in things if thing.kind in SHAPES]
    for _ in range(ITEMS):
        kind, colour = rng.choice(SHAPES), rng.choice(tuple(COLOURS))
        if shown and rng.random() < 0.8:
            # Words of one thing or of two: each is right, but the pair may be wrong.
            one = rng.choice(shown)
            kind = one.kind if rng.random() < 0.8 else kind
            colour = one.colour if rng.random() < 0.6 else rng.choice(shown).colour
        if rng.random() < 0.35:
            names[kind] = [thing for thing in things if thing.kind == kind]
        else:
            both = (kind, colour)
            found = [thing for thing in things if (thing.kind, thing.colour) == both]
            names[f"{colour} {kind}"] = found
    return list(names.items())


def _there(rng: random.Random, things: Sequence[Thing]) -> Turn:
    items = [(name, yes_no(bool(found))) for name, found in some_names(rng, things)]
    return drill("Which of these are there?", items)


def _places(rng: random.Random, things: Sequence[Thing]) -> Turn:
    items = [
        (name, PLACES[found[0].row, found[0].column] if found else "no")
        for name, found in some_names(rng, things)
        if len(found) < 2
    ]
    return drill("Where are these?", items or [(things[0].kind, "no")])


def _counts(rng: random.Random, things: Sequence[Thing]) -> Turn:
    kinds, colours = [t.kind for t in things], [t.colour for t in things]
    items: dict[str, int] = {}
    for _ in range(ITEMS):
        if rng.random() < 0.5:
            kind = rng.choice(kinds if rng.random() < 0.7 else SHAPES)
            items[plural(kind)] = kinds.count(kind)
        else:
            colour = rng.choice(colours if rng.random() < 0.7 else tuple(COLOURS))
            items[f"{colour} {rng.choice(('shapes', 'objects'))}"] = colours.count(colour)
    said = [(name, NUMBERS[count].lower()) for name, count in items.items()]
    return drill("How many of each?", said)


def _bigger(rng: random.Random, things: Sequence[Thing]) -> Turn:
    word = rng.choice(("bigger", "larger", "smaller"))
    big = [thing for thing in things if thing.big]
    small = [thing for thing in things if not thing.big]
    items = []
    for _ in range(4):
        pair = [rng.choice(big), rng.choice(small)]
        chosen = pair[word == "smaller"]
        rng.shuffle(pair)
        names = {
            thing: thing.kind
            if rng.random() < 0.6 and sum(t.kind == thing.kind for t in things) == 1
            else named(thing)
            for thing in pair
        }
        items.append((f"{names[pair[0]]} or the {names[pair[1]]}", names[chosen]))
    return drill(f"Which is {word}?", items)


def album_drills(rng: random.Random, album: Sequence[Scene]) -> list[Turn]:
    """Return training turns about several pictures of one thing each."""
    things = [scene.things[0] for scene in album]

    def says(kind: str) -> list[str]:
        return [ORDINALS[i] for i, thing in enumerate(things) if thing.kind == kind]

    listed = roster(f"Which {noun(rng)} has each shape?", says)
    return [listed, rng.choice((_which, _there_in))(rng, things)]


def _which(rng: random.Random, things: Sequence[Thing]) -> Turn:
    named_things = some_names(rng, things)
    named_things += [
        (f"{thing.colour} shape", [t for t in things if t.colour == thing.colour])
        for thing in things
        if all(t.kind in SHAPES for t in things)
    ]
    named_things += [(t.kind, [t]) for t in things if t.kind in DIGITS]
    rng.shuffle(named_things)
    items = [
        (name, ORDINALS[things.index(found[0])] if found else "no")
        for name, found in named_things
        if len(found) < 2
    ]
    return drill(f"Which {noun(rng)} has these?", items or [(things[0].kind, "no")])


def _there_in(rng: random.Random, things: Sequence[Thing]) -> Turn:
    items = []
    for _ in range(ITEMS - 1):
        place, asked = rng.randrange(len(things)), rng.choice(things)
        asked = things[place] if rng.random() < 0.4 else asked
        kind = asked.kind if rng.random() < 0.9 else rng.choice(KINDS)
        colour = asked.colour if rng.random() < 0.8 else rng.choice(tuple(COLOURS))
        there = (kind, colour) == (things[place].kind, things[place].colour)
        items.append((f"{colour} {kind} in the {ORDINALS[place]}", yes_no(there)))
    return drill("Which of these are there?", items)


def clip_drills(rng: random.Random, clip: Clip) -> list[Turn]:
    """Return training turns about a video: the content of each second, and of the whole video.

    The former tie timestamps to pictures.
    """
    if clip.story == "motion":
        return [_there(rng, clip.things)] if rng.random() < 0.3 else []
    parts = []
    for second in range(clip.seconds):
        thing = visible(clip, second * clip.frame_rate)
        says = "no" if thing is None else named(thing) if clip.story == "sequence" else thing.colour
        parts.append(f"{second}: {says}")
    listed = Turn("roster", "What happens at each second?", f"At {', '.join(parts)}.")
    return [listed, _there(rng, clip.things)] if clip.story == "sequence" else [listed]
