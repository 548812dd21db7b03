"""Forced calls and JSON of grammars, where no name needs copying: only values are learned."""

from __future__ import annotations

import random

from demo_fields import Field, chosen, scene_fields, unknown_field
from demo_forms import call_pieces, json_pieces, signature, with_tools
from demo_more import describe_wording, direct
from demo_scenes import Scene
from demo_talk import talk_turn
from demo_text import identifier, instructions, prose
from demo_tools import CAMERAS, Talk, request, short_results, tool_name
from demo_words import MEDIA_HERE, Turn

DONE = "Done."


def forced_call(rng: random.Random, scene: Scene | None, split: str) -> Talk:
    """Return a forced call about a picture, or about nothing known, and what comes after it."""
    if scene is not None and scene.things and rng.random() < 0.2:
        return _camera(rng, scene, split)
    calls = [_fields(rng, scene, split) for _ in range(rng.choice((1, 1, 2)))]
    turns, tools = [], []
    for number, fields in enumerate(calls):
        name = tool_name(rng, split)
        asked = request(rng, name) if scene is not None else _words(rng)
        turns.append(_call(asked, name, fields))
        if rng.random() < 0.4:
            turns.append(
                Turn("result", f"<tool_response>\n{short_results(rng)}\n</tool_response>", DONE)
            )
        if number < 1 or rng.random() < 0.3:
            tools.append(signature(rng, name, prose(rng, rng.randint(0, 6) or 1), fields))
    if scene is not None and rng.random() < 0.5:
        turns.append(direct(rng, scene))
    return Talk(tuple(turns), _system(rng, tools))


def _call(question: str, name: str, fields: list[Field]) -> Turn:
    parts, given = call_pieces(name, fields)
    return Turn("forced call", question, "".join(parts), parts, given)


def _fields(rng: random.Random, scene: Scene | None, split: str) -> list[Field]:
    if scene is None:
        return [unknown_field(rng, split) for _ in range(rng.randint(1, 4))]
    return chosen(rng, scene_fields(rng, scene), split)


def _words(rng: random.Random) -> str:
    asks = (
        talk_turn(rng, copying=False).question,
        prose(rng, rng.randint(3, 15)),
        "Extract the data.",
    )
    return rng.choice(asks)


def _system(rng: random.Random, tools: list[dict[str, object]]) -> str:
    says = instructions(rng, rng.choice((5, 15))) if rng.random() < 0.2 else ""
    return with_tools(tools, says)


def _camera(rng: random.Random, scene: Scene, split: str) -> Talk:
    """Return a call of a camera, whose result is the picture, and questions about it."""
    name = rng.choice(CAMERAS) if rng.random() < 0.6 else identifier(rng, split)
    fields = [] if rng.random() < 0.5 else [unknown_field(rng, split)]
    asked = [direct(rng, scene) for _ in range(3)]
    shown = f"<tool_response>\n{MEDIA_HERE}{rng.choice(('', '', 'ok'))}\n</tool_response>"
    turns = (_call(asked[0].question, name, fields), Turn(asked[0].kind, shown, asked[0].answer))
    tools = [signature(rng, name, "Takes a picture.", fields)]
    return Talk((*turns, *asked[1:]), _system(rng, tools))


def forms(rng: random.Random, scene: Scene | None, split: str) -> Talk:
    """Return several JSON objects of grammars."""
    turns = []
    for _ in range(rng.choice((2, 3))):
        fields = _fields(rng, scene, split)
        parts, given = json_pieces(fields)
        asked = describe_wording(rng) if scene is not None else _words(rng)
        turns.append(Turn("json", asked, "".join(parts), parts, given))
    return Talk(tuple(turns))
