"""Drills of copying: many values, names and functions to find again in few tokens.

Single requests teach one copy each and did not lead to any in a thousand steps. `copies` leads to
them in a few hundred: nearly all of its tokens are found by the two before them.
"""

from __future__ import annotations

import json
import random

from demo_chat import ChatFormat, Encoded
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

COPIED, STRETCHES, NAMES = (24, 64), 3, 6


def copies(rng: random.Random, chat: ChatFormat, split: str) -> Encoded:
    """Return a list, and parts of it again: each time, what comes after two tokens is learned.

    The list is one of names, or of any tokens.
    """
    out = Encoded()
    if rng.random() < 0.2:
        listed = [rng.choice(chat.plain) for _ in range(rng.randint(*COPIED))]
        starts = [rng.randrange(len(listed) - 4) for _ in range(STRETCHES)]
        parts = [listed[at : at + rng.randint(8, 40)] for at in starts]
    else:
        names = [identifier(rng, split) for _ in range(rng.randint(4, 10))]
        listed = list(chat.encode_text(", ".join(names)))
        again = rng.sample(names, min(len(names), NAMES))
        parts = [list(chat.encode_text(f" {name},")) for name in again]
    chat.message(out, "user", listed)
    chat.message(out, "assistant", [], open_end=True)
    for part in parts:
        chat.tokens(out, part[:2])
        chat.tokens(out, part[2:], learned=0)
    return out


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


def names_in_order(rng: random.Random, split: str) -> Talk:
    """Return calls of functions with several parameters, all of which must be found in turn."""
    names = [identifier(rng, split) for _ in range(rng.choice((1, 1, 2)))]
    tools, calls = [], []
    for name in names:
        made = [unknown_field(rng, split) for _ in range(rng.randint(0, 2))]
        plain = rng.sample(("shape", "color", "position", "count"), rng.randint(1, 3))
        made += [known(key, 0 if key == "count" else "unknown") for key in plain]
        rng.shuffle(made)
        fields = list({field.name: field for field in made}.values())
        tools.append(signature(rng, name, prose(rng, rng.randint(1, 5)), fields))
        calls += [(name, fields)] * rng.choice((1, 2))
    rng.shuffle(calls)
    turns = []
    for name, fields in calls:
        asked = "Use the tool." if len(names) == 1 and rng.random() < 0.5 else f"Call {name}."
        turns.append(Turn("call by name", asked, call_text(name, fields)))
    if rng.random() < 0.4:
        return Talk(tuple(turns), with_tools(tools, ""))
    return Talk(tuple(turns), "\n".join(json.dumps(tool) for tool in tools))


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
