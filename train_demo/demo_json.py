"""Turns with a JSON answer: of a grammar alone, or of a schema that the prompt contains."""

from __future__ import annotations

import random
from collections.abc import Sequence

from demo_fields import Field, answer_field, chosen, known, scene_fields, thing_fields, told
from demo_forms import FENCE_PROMPT, fenced, form_schema, json_pieces, json_text, schema_prompt
from demo_more import describe_wording
from demo_questions import pick
from demo_records import PLEAS
from demo_scenes import SHAPES, Scene
from demo_tools import Talk
from demo_words import Turn, named


def written(
    rng: random.Random, question: str, fields: Sequence[Field], *, prompted: float = 0.6
) -> Talk:
    """Return one turn with JSON; with the chance of `prompted` the words ask for it."""
    text = json_text(fields)
    if rng.random() >= prompted:
        parts, given = json_pieces(fields)
        return Talk((Turn("json", question, text, parts, given),))
    style = rng.random()
    if style < 0.25:
        names = [field.name for field in fields]
        wanted = " and ".join((", ".join(names[:-1]), names[-1]) if names[1:] else names)
        ask = rng.choice(
            ("Answer as JSON with {}.", "Reply with JSON: {}.", "Give me JSON with {}.")
        )
        return Talk((Turn("json by name", f"{question} {ask.format(wanted)}", text),))
    prompt = schema_prompt(rng, form_schema(rng, fields))
    if style < 0.4:
        wrapped = Turn("json by schema", f"{question}\n\n{FENCE_PROMPT}", fenced(text))
        return Talk((wrapped,), prompt)
    if style < 0.7:
        return Talk((Turn("json by schema", question, text),), prompt)
    order = (question, prompt) if rng.random() < 0.7 else (prompt, question)
    return Talk((Turn("json by schema", "\n\n".join(order), text),))


def picture_json(rng: random.Random, scene: Scene, split: str) -> Talk:
    """Return JSON about a picture."""
    question, facts = describe_wording(rng), scene_fields(rng, scene)
    if rng.random() < 0.15 and scene.things:
        return plain(rng, scene)
    kinds = [thing.kind for thing in scene.things]
    if rng.random() < 0.25 and len(kinds) > 1 and kinds[0] in SHAPES:
        thing = rng.choice(scene.things)
        question = f"Look at the {named(thing)}."
        if kinds.count(thing.kind) == 1 and rng.random() < 0.5:
            question = f"What about the {thing.kind}?"
        facts = thing_fields(rng, thing) + facts[3:]
    fields = chosen(rng, facts, split)
    if rng.random() < 0.15 and scene.things:
        asked = pick(rng, scene)
        question = asked.question
        fields.append(answer_field(rng, asked.answer))
    return written(rng, question, fields, prompted=0.35)


def plain(rng: random.Random, scene: Scene) -> Talk:
    """Return JSON asked for without names: they are always the same."""
    thing = scene.reading_order[0]
    fields = [known("shape", thing.kind), known("color", thing.colour)]
    question = f"{describe_wording(rng)} {rng.choice(PLEAS)}"
    return Talk((Turn("json by plea", question, json_text(fields)),))


def text_json(rng: random.Random, split: str) -> Talk:
    """Return JSON of what a text tells."""
    question, fields = told(rng, split)
    if rng.random() < 0.25:
        fields = chosen(rng, fields, split)
    return written(rng, question, fields, prompted=0.6)
