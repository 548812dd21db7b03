"""Conversations with tools: when to call which, with what, and what to say of the result.

A request that names a tool, or that a tool's arguments fit, gets a call. Greetings and questions
that no tool fits are answered directly. A forced call gives the names, as a grammar does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from demo_fields import Field, Schema, chosen, known, scene_fields, short, told, unknown_field
from demo_forms import call_pieces, call_text, signature, with_tools
from demo_more import describe_wording, direct
from demo_scenes import SHAPES, Scene
from demo_talk import talk_turn
from demo_text import capital_name, identifier, instructions, prose
from demo_words import MEDIA_HERE, Turn, color, noun

SHOW_VERBS = ("report", "save", "log", "submit", "record", "describe", "store", "note", "show")
SHOW_NOUNS = ("picture", "shape", "result", "image", "object", "scene", "colour", "color", "answer")
CLASSES = ("Shape", "Picture", "Answer", "Result", "Scene", "Response", "Output", "ImageInfo")
CAMERAS = ("take_picture", "get_picture", "take_photo", "screenshot", "load_image", "get_image")


@dataclass(frozen=True)
class Talk:
    """A conversation for training: its turns and its system message."""

    turns: tuple[Turn, ...]
    system: str | None = None


def tool_name(rng: random.Random, split: str) -> str:
    """Return a name for a tool that takes facts about a picture."""
    style = rng.random()
    if style < 0.4:
        return f"{rng.choice(SHOW_VERBS)}_{rng.choice(SHOW_NOUNS)}"
    if style < 0.6:
        return rng.choice(CLASSES)
    return "final_result" if style < 0.7 else identifier(rng, split)


def distractors(rng: random.Random, split: str, most: int = 2) -> list[Schema]:
    """Return tools that fit nothing."""
    tools = []
    for _ in range(rng.choice((0, 0, 0, 1, most))):
        fields = [unknown_field(rng, split) for _ in range(rng.randint(0, 3))]
        about = prose(rng, rng.randint(3, 15))
        tools.append(signature(rng, identifier(rng, split), about, fields))
    return tools


def _system(rng: random.Random, tools: list[Schema]) -> str:
    rng.shuffle(tools)
    says = ""
    if rng.random() < 0.4:
        size = rng.choice((6, 15, 40))
        says = "You are a helpful assistant." if rng.random() < 0.4 else instructions(rng, size)
    return with_tools(tools, says)


def call_turn(
    rng: random.Random, question: str, calls: Sequence[tuple[str, Sequence[Field]]], forced: bool
) -> Turn:
    """Return a turn that calls tools; a single forced call has its names given."""
    if forced and len(calls) == 1:
        parts, given = call_pieces(*calls[0])
        return Turn("call", question, "".join(parts), parts, given)
    text = "\n".join(call_text(name, fields) for name, fields in calls)
    if forced:
        head = "<tool_call>\n<function"
        return Turn("call", question, text, (head, text[len(head) :]), frozenset({0}))
    return Turn("call", question, text)


def result_turn(rng: random.Random, count: int, split: str) -> Turn:
    """Return the results of `count` calls and what is said of them."""
    results = [_result(rng, split) for _ in range(count)]
    shown = "\n".join(f"<tool_response>\n{each}\n</tool_response>" for each in results)
    return Turn("result", shown, f"It says: {', '.join(results)}")


def _result(rng: random.Random, split: str) -> str:
    value = rng.randrange(10 ** rng.randint(1, 4))
    return rng.choice(
        (
            "ok",
            "done",
            '{"status": "ok"}',
            str(value),
            f"{value} degrees, {prose(rng, 2)[:-1].lower()}",
            prose(rng, rng.randint(2, 7)),
            f"{capital_name(rng)} {capital_name(rng)}",
            f'{{"{identifier(rng, split)}": {value}}}',
            f'{{"{identifier(rng, split)}": "{capital_name(rng)}"}}',
        )
    )


def picture_talk(rng: random.Random, scene: Scene, split: str) -> Talk:
    """Return a conversation with tools about a picture, which its first question shows."""
    style = rng.random()
    if style < 0.12 and scene.things:
        return _picture_in_result(rng, scene, split)
    if style < 0.25:
        return _not_called(rng, scene, split)
    name, facts = tool_name(rng, split), chosen(rng, scene_fields(rng, scene), split)
    calls: list[tuple[str, Sequence[Field]]] = [(name, facts)]
    if style < 0.45 and scene.things and scene.things[0].kind in SHAPES:
        names = rng.choice((("shape", "color"), ("shape", "position"), ("color", "shape")))
        each = [short(thing, names) for thing in scene.reading_order]
        calls = [(name, [known(key, value) for key, value in one.items()]) for one in each]
        question = rng.choice(
            (
                "Report every shape.",
                "Call the tool for each shape.",
                f"Call {name} for every shape.",
            )
        )
    else:
        question = request(rng, name)
    tools = [signature(rng, name, _about(rng), calls[0][1]), *distractors(rng, split, 2)]
    other = tool_name(rng, split)
    if rng.random() < 0.3 and other != name:
        # Two tools fit, so the request names one.
        question = _by_name(rng, name) if len(calls) == 1 else question
    turns = [call_turn(rng, question, calls, rng.random() < 0.35)]
    if rng.random() < 0.6:
        turns.append(result_turn(rng, len(calls), split))
    if other != name and name in question:
        more_facts = chosen(rng, scene_fields(rng, scene), split)
        tools.append(signature(rng, other, _about(rng), more_facts))
        turns.append(
            call_turn(rng, _by_name(rng, other), [(other, more_facts)], rng.random() < 0.3)
        )
    return Talk(tuple(turns), _system(rng, tools))


def _by_name(rng: random.Random, name: str) -> str:
    return rng.choice(
        (f"Call {name}.", f"Use {name}.", f"Use the {name} tool.", f"Now call {name}.")
    )


def _about(rng: random.Random) -> str:
    if rng.random() < 0.4:
        return prose(rng, rng.randint(2, 12))
    return rng.choice(
        (
            f"Reports what the {noun(rng)} shows",
            f"Report the {color(rng)} and shape.",
            f"Save facts about the {noun(rng)}.",
            "The final response which ends this conversation",
            "Correctly extracted `Shape` with all the required parameters with correct types",
            "",
        )
    )


def request(rng: random.Random, name: str) -> str:
    return rng.choice(
        (
            describe_wording(rng),
            describe_wording(rng),
            f"Call {name}.",
            f"Use {name}.",
            f"Use the {name} tool.",
            "Use the tool.",
            "Report it.",
            f"Report the {noun(rng)}.",
            f"Report what you see in the {noun(rng)}.",
            "Extract the data.",
            "Extract this.",
        )
    )


def _not_called(rng: random.Random, scene: Scene, split: str) -> Talk:
    """Return plain questions about a picture next to tools that do not fit them."""
    tools = distractors(rng, split)
    turns = [direct(rng, scene), talk_turn(rng)]
    if not tools:
        fields, _ = told(rng, split)[1], rng.random()
        tools.append(signature(rng, identifier(rng, split), prose(rng, 5), fields))
    return Talk(tuple(turns[: rng.randint(1, 2)]), _system(rng, tools))


def _picture_in_result(rng: random.Random, scene: Scene, split: str) -> Talk:
    """Return a call of a camera, whose result is the picture."""
    name = rng.choice(CAMERAS) if rng.random() < 0.6 else identifier(rng, split)
    fields = [] if rng.random() < 0.6 else [known("name", capital_name(rng))]
    asked = direct(rng, scene)
    ask = rng.choice(
        ("Take a picture. {}", "Call {name}. {}", "Use the tool. {}", "Get the picture. {}")
    )
    about = f": {fields[0].value}. " if fields else ". "
    question = ask.replace("{name}", name).replace(". ", about, 1).replace("{}", asked.question)
    text = rng.choice(("", "", "Here it is.", "ok"))
    shown = f"<tool_response>\n{MEDIA_HERE}{text}\n</tool_response>"
    turns = (
        call_turn(rng, question, [(name, fields)], rng.random() < 0.3),
        Turn(asked.kind, shown, asked.answer),
    )
    tools = [signature(rng, name, rng.choice(("Takes a picture.", prose(rng, 4))), fields)]
    return Talk(turns, _system(rng, tools + distractors(rng, split)))


def text_talk(rng: random.Random, split: str) -> Talk:
    """Return a conversation with tools and no picture."""
    tools = distractors(rng, split)
    if rng.random() < 0.25 and tools:
        turns = [talk_turn(rng) for _ in range(rng.randint(1, 2))]
        return Talk(tuple(turns), _system(rng, tools))
    question, facts = told(rng, split)
    name = identifier(rng, split)
    style = rng.random()
    if style < 0.3:
        name = rng.choice(
            (
                "get_weather",
                "get_time",
                "search",
                "add",
                "calculate",
                "Person",
                "User",
                "save_user",
                "final_result",
                "lookup",
            )
        )
    if style > 0.85:
        facts = [*facts, unknown_field(rng, split)]
    calls: list[tuple[str, Sequence[Field]]] = [(name, facts)]
    city = facts[0].value
    if len(facts) == 1 and isinstance(city, str) and rng.random() < 0.3 and city in question:
        other = capital_name(rng)
        question = question.replace(city, f"{city} and {rng.choice(('', 'in '))}{other}")
        calls.append((name, [replace(facts[0], value=other)]))
    if rng.random() < 0.15:
        question = f"{question} {rng.choice(('Use the tool.', f'Call {name}.', f'Use {name}.'))}"
    forced = rng.random() < 0.4
    if forced and rng.random() < 0.3:
        # Nothing in the request fits: each argument is what an unknown one is.
        question, calls = (
            talk_turn(rng).question,
            [(name, [unknown_field(rng, split) for _ in range(rng.randint(1, 3))])],
        )
    tools.append(signature(rng, name, prose(rng, rng.randint(2, 8)), calls[0][1]))
    turns = [call_turn(rng, question, calls, forced)]
    if rng.random() < 0.6:
        turns.append(result_turn(rng, len(calls), split))
    return Talk(tuple(turns), _system(rng, tools))
