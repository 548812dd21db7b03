"""Many forced calls and JSON of grammars about one picture: names are given, values are learned.

No prompt describes them, so that most tokens teach something.
"""

from __future__ import annotations

import random

from demo_fields import Field, chosen, known, scene_fields, told
from demo_forms import call_pieces, json_pieces
from demo_more import describe_wording
from demo_scenes import Scene
from demo_tools import Talk, request, result_turn, tool_name
from demo_words import Turn

PLAIN = ("shape", "color", "position")


def simple(rng: random.Random, scene: Scene) -> list[Field]:
    """Return up to four single facts in random order, half of them under their plainest names."""
    facts = scene_fields(rng, scene)
    plain = [known(name, fact.value) for name, fact in zip(PLAIN, facts, strict=False)]
    number = len(scene.things)
    counted = known("count", number)
    made = [*(plain if rng.random() < 0.5 else facts[:3]), counted]
    if scene.things and rng.random() < 0.5:
        made += [fact for fact in facts[4:] if isinstance(fact.value, int)]
    return rng.sample(made, min(len(made), rng.choice((1, 2, 3, 4))))


def drills(rng: random.Random, scene: Scene, split: str) -> Talk:
    """Return many calls and JSON objects of a few single facts each."""
    turns = []
    for _ in range(6):
        fields = simple(rng, scene)
        if rng.random() < 0.4:
            parts, given = json_pieces(fields)
            turns.append(Turn("json", describe_wording(rng), "".join(parts), parts, given))
            continue
        name = tool_name(rng, split)
        parts, given = call_pieces(name, fields)
        asked = "Use the tool." if rng.random() < 0.6 else describe_wording(rng)
        turns.append(Turn("forced call", asked, "".join(parts), parts, given))
    return Talk(tuple(turns))


def told_facts(rng: random.Random, split: str) -> Talk:
    """Return such calls and JSON of what texts tell, and what is said of the calls' results."""
    turns = []
    for _ in range(5):
        question, fields = told(rng, split)
        if rng.random() < 0.35:
            parts, given = json_pieces(fields)
            turns.append(Turn("json", question, "".join(parts), parts, given))
            continue
        parts, given = call_pieces(tool_name(rng, split), fields)
        turns.append(Turn("forced call", question, "".join(parts), parts, given))
        if rng.random() < 0.4:
            turns.append(result_turn(rng, 1, split))
    return Talk(tuple(turns))


def facts(rng: random.Random, scene: Scene, split: str) -> Talk:
    """Return some of them, in random order."""
    turns = []
    for _ in range(rng.choice((3, 4, 5))):
        fields = chosen(rng, scene_fields(rng, scene), split)
        if rng.random() < 0.5:
            parts, given = json_pieces(fields)
            turns.append(Turn("json", describe_wording(rng), "".join(parts), parts, given))
            continue
        name = tool_name(rng, split)
        parts, given = call_pieces(name, fields)
        asked = request(rng, name)
        turns.append(Turn("forced call", asked, "".join(parts), parts, given))
    return Talk(tuple(turns))
