"""Questions that count, confirm or compare the things in a picture."""

from __future__ import annotations

import random

from demo_lookups import reference, shapes_of, unique_kind
from demo_scenes import COLOURS, SHAPES, Scene, Thing
from demo_words import NUMBERS, Turn, is_so, named, noun, plural, sentence, with_article, yes_no


def ask_count(rng: random.Random, scene: Scene) -> Turn | None:
    if not shapes_of(scene):
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
        count, what = present.count(kind), plural(kind)
    else:
        present = [thing.colour for thing in scene.things]
        colour = rng.choice(present if rng.random() < 0.75 else tuple(COLOURS))
        count, what = present.count(colour), f"{colour} {rng.choice(('shapes', 'objects'))}"
    wordings = (
        f"How many {what} are there?",
        f"How many {what} do you see?",
        f"Count the {what}.",
    )
    return Turn("count some", rng.choice(wordings), sentence(f"{what}: {NUMBERS[count].lower()}"))


def ask_exists(rng: random.Random, scene: Scene) -> Turn | None:
    shapes = shapes_of(scene)
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
    return Turn("yes or no", rng.choice(wordings), is_so(what, there))


def ask_is_colour(rng: random.Random, scene: Scene) -> Turn | None:
    thing = unique_kind(rng, scene)
    if thing is None:
        return None
    colour = thing.colour
    if rng.random() < 0.5:
        colour = rng.choice([t.colour for t in scene.things] + list(COLOURS))
    question = f"Is the {thing.kind} {colour}?"
    says = f"the {thing.kind} is {thing.colour}, so {yes_no(colour == thing.colour)}"
    return Turn("yes or no", question, sentence(says))


def _pair(rng: random.Random, scene: Scene) -> tuple[Thing, Thing] | None:
    if len(scene.things) < 2:
        return None
    one, two = rng.sample(scene.things, 2)
    return one, two


def ask_bigger(rng: random.Random, scene: Scene) -> Turn | None:
    pair = _pair(rng, scene)
    if pair is None or pair[0].big == pair[1].big:
        return None
    names = [reference(rng, scene, thing) for thing in pair]
    # One fact about the first thing is enough.
    found = f"the {names[0]} is {'bigger' if pair[0].big else 'smaller'}"
    big, small = names if pair[0].big else reversed(names)
    style = rng.randrange(4)
    if style == 0:
        question = f"Is the {names[0]} bigger than the {names[1]}?"
        return Turn("comparison", question, sentence(f"{found}, so {yes_no(pair[0].big)}"))
    word, chosen = rng.choice((("bigger", big), ("larger", big), ("smaller", small)))
    question = f"Which is {word}, the {names[0]} or the {names[1]}?"
    return Turn("comparison", question, sentence(f"{found}, so the {chosen}"))


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
