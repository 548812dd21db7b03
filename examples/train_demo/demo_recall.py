"""Drills of copying: many values, names and functions to find again in few tokens.

Single requests teach one copy each and did not lead to any in a thousand steps.
"""

from __future__ import annotations

import random

from demo_fields import Field, known, unknown_field
from demo_forms import (
    call_pieces,
    call_text,
    form_schema,
    json_pieces,
    json_text,
    schema_prompt,
    signature,
    with_tools,
)
from demo_text import capital_name, identifier, prose
from demo_tools import Talk
from demo_words import Turn


def recall(rng: random.Random, split: str) -> Talk:
    """Return one of these drills."""
    make = rng.choices((_values, _repeat, _names, _functions), (4, 8, 3, 2))[0]
    return make(rng, split)


def _value(rng: random.Random) -> str | int:
    word = capital_name(rng)
    return rng.choice(
        (word, word, f"{word} {capital_name(rng)}", rng.randrange(10 ** rng.randint(1, 4)))
    )


def _fields(rng: random.Random, split: str, count: int) -> list[Field]:
    made = {
        name: known(name, _value(rng)) for name in (identifier(rng, split) for _ in range(count))
    }
    return list(made.values())


def _values(rng: random.Random, split: str) -> Talk:
    """Return values that stand behind their names, asked for in another order."""
    fields = _fields(rng, split, rng.randint(4, 9))
    joint = rng.choice((": {}", " is {}", " = {}"))
    texts = [field.name.replace("_", " ") + joint.format(field.value) for field in fields]
    question = rng.choice((", ", "; ", "\n")).join(texts) + "."
    rng.shuffle(fields)
    pieces = (
        json_pieces
        if rng.random() < 0.6
        else lambda some: call_pieces(identifier(rng, split), some)
    )
    parts, given = pieces(fields)
    return Talk((Turn("recall", question, "".join(parts), parts, given),))


def _repeat(rng: random.Random, split: str) -> Talk:
    """Return a text to repeat."""
    names = " ".join(capital_name(rng) for _ in range(rng.choice((3, 12, 25, 40))))
    said = names if rng.random() < 0.5 else prose(rng, rng.choice((8, 30, 60, 90)))
    return Talk(
        (Turn("copy", f"{rng.choice(('Say', 'Repeat', 'Repeat after me'))}: {said}", said),)
    )


def _names(rng: random.Random, split: str) -> Talk:
    """Return JSON whose names stand in a schema."""
    fields = {
        field.name: field for field in (unknown_field(rng, split) for _ in range(rng.randint(3, 6)))
    }
    some = list(fields.values())
    prompt = schema_prompt(rng, form_schema(rng, some))
    return Talk((Turn("json by schema", "Extract the data.", json_text(some)),), prompt)


def _functions(rng: random.Random, split: str) -> Talk:
    """Return several calls of functions by their names."""
    names = list(dict.fromkeys(identifier(rng, split) for _ in range(rng.randint(2, 4))))
    fields = {name: _fields(rng, split, rng.choice((0, 1, 1, 2))) for name in names}
    tools = [signature(rng, name, prose(rng, 3), fields[name]) for name in names]
    turns = []
    for name in rng.sample(names, len(names)):
        filled = [known(field.name, _value(rng)) for field in fields[name]]
        about = ", ".join(f"{f.name.replace('_', ' ')} {f.value}" for f in filled)
        question = f"{rng.choice(('Call', 'Use'))} {name}" + (f" with {about}." if about else ".")
        turns.append(Turn("call by name", question, call_text(name, filled)))
    return Talk(tuple(turns), with_tools(tools, ""))
