"""Rewritten templates write what they wrote before, and only sound ones are rewritten."""

from __future__ import annotations

import random
from typing import Any

import chat_templates
import published_templates
import pytest
from sweeps import quick

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.text.known_turns import KnownTurns
from vlm_serve.preprocess.text.template import ChatTemplate

WORDS = (
    "a", "hello", "<tool_response>x</tool_response>", "</think>", "<think>\nq\n</think>\n\nz",
    " b \n", "é",
)  # fmt: skip
Message = dict[str, Any]


def content(rng: random.Random) -> Any:
    if rng.random() < 0.6:
        return rng.choice(WORDS) + rng.choice(WORDS)
    kinds = [{"type": "text", "text": rng.choice(WORDS)}, {"type": "image"}, {"type": "video"}]
    return [dict(rng.choice(kinds)) for _ in range(rng.randint(0, 3))]


def message(rng: random.Random) -> Message:
    role = rng.choice(("user", "assistant", "tool", "user", "assistant", "system"))
    made: Message = {"role": role, "content": content(rng)}
    if role == "assistant":
        if rng.random() < 0.3:
            made["reasoning_content"] = rng.choice(WORDS)
        if rng.random() < 0.4:
            call = {"function": {"name": "f", "arguments": {"x": 1, "y": rng.choice(WORDS)}}}
            made["tool_calls"] = [call] * rng.randint(1, 2)
        if rng.random() < 0.1:
            made["content"] = None
    return made


def changed(messages: list[Message], rng: random.Random) -> list[Message]:
    """Grown, cut, edited, with another beginning, or begun again."""
    chance = rng.random()
    if chance < 0.6 or not messages:
        return [*messages, message(rng)]
    if chance < 0.75:
        return messages[: rng.randint(0, len(messages))]
    if chance < 0.85:
        at = rng.randrange(len(messages))
        return [*messages[:at], message(rng), *messages[at + 1 :]]
    if chance < 0.9:
        return [{"role": "system", "content": "s"}, *messages]
    return [{"role": "user", "content": "q"}, *messages[1:]][:14]


def assert_alike(source: str, seed: int, steps: int) -> None:
    template = ChatTemplate(source)
    assert template._turning is not None
    known, rng, messages = KnownTurns(1 << 20), random.Random(seed), list[Message]()

    def rendered(**options: Any) -> str:
        try:
            return template.render(messages, **options)
        except InvalidRequestError as error:
            return f"refused: {error.message}"

    for _ in range(steps):
        messages = changed(messages, rng)
        names = ("enable_thinking", "add_vision_id", "preserve_thinking")
        options: dict[str, Any] = {
            "kwargs": {n: rng.choice((True, False)) for n in names if rng.random() < 0.3},
            "tools": [{"name": "f"}] if rng.random() < 0.3 else None,
            "add_generation_prompt": rng.random() < 0.5,
        }
        turns = known.of("tenant")
        assert rendered(**options, turns=turns) == rendered(**options)
    assert len(known) > 5


@pytest.mark.parametrize("seed", quick(range(6), 1))
@pytest.mark.parametrize("name", published_templates.NAMES)
def test_texts_are_as_before(name: str, seed: int) -> None:
    assert_alike(published_templates.source_of(name), seed, 300)


LOOP = "{{% for m in messages %}}{}{{% endfor %}}"
SOUND = {
    "counter": "{% set ns = namespace(n=0, sep='-') %}"
    + LOOP.format("{% set ns.n = ns.n + 1 %}{{ ns.sep ~ ns.n ~ m.role }}"),
    "counter in a macro": "{% set ns = namespace(n=0) %}{% macro say(m) %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n ~ m.role }}{% endmacro %}" + LOOP.format("{{ say(m) }}"),
    "own namespace": LOOP.format(
        "{% set one = namespace(t='') %}"
        "{% for c in m.role %}{% set one.t = c ~ one.t %}{% endfor %}{{ one.t ~ loop.last }}"
    ),
    "neighbours": LOOP.format(
        "{% if loop.nextitem is defined and loop.nextitem.role == 'tool' %}+{% endif %}"
        "{% if not loop.first and messages[loop.index0 - 1].role == m.role %}={% endif %}"
        "{{ m.role ~ (messages | length > 3) }}"
    ),
    "guarded": LOOP.format(
        "{% if loop.previtem %}{% if loop.previtem.role == 'user' %}u{% endif %}{% endif %}"
        "{{ m.role }}"
    ),
    "variables": LOOP.format("{{ m.role ~ (preserve_thinking | default('?')) ~ add_vision_id }}"),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_a_turn_reads_belongs_to_its_name(name: str) -> None:
    assert_alike(SOUND[name], 3, 300)


UNSOUND = {
    "changed": "{{ loop.changed(m.role) }}",
    "cycle": "{{ loop.cycle('a', 'b') }}",
    "whole loop": "{% set l = loop %}{{ l.index }}",
    "random": "{{ [1, 2, 3] | random }}",
    "clock": "{{ strftime_now('%S') }}",
    "words": "{{ lipsum() }}",
    "read before it is set": "{{ sep }}{% set sep = m.role %}",
    "set in one branch": "{% if m.role == 'user' %}{% set sep = 1 %}{% endif %}{{ sep }}",
    "another name of a namespace": "{% set b = ns %}{% set b.n = 1 %}{{ ns.n }}",
    "a namespace passed on": "{{ ns | string }}",
    "unknown function": "{{ cycler('a').next() }}",
    "include": "{% include 'x' %}",
    "skips": "{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.role }}",
    "macro inside": "{% macro f() %}x{% endmacro %}{{ f() }}",
    "the macro's own name": "{% set outer = m.role %}{{ reads() }}",
}


@pytest.mark.parametrize("name", UNSOUND)
def test_a_loop_with_anything_else_stays(name: str) -> None:
    before = (
        "{% set ns = namespace(n=0) %}{% set sep = '-' %}"
        "{% macro reads() %}{{ outer }}{% endmacro %}"
    )
    template = ChatTemplate(before + LOOP.format(UNSOUND[name]))
    assert template._turning is None


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages | reverse %}{{ m.role }}{% endfor %}",
        "{% for m in messages if m.role %}{{ m.role }}{% endfor %}",
        "{% set messages = messages[1:] %}" + LOOP.format("{{ m.role }}"),
        LOOP.format("{{ m.role }}") * 2,
    ],
)
def test_loops_of_another_form_stay(source: str) -> None:
    assert ChatTemplate(source)._turning is None


def test_tenants_share_nothing_and_memory_is_bounded() -> None:
    template, known = ChatTemplate(chat_templates.DUMPS_JSON), KnownTurns(20_000)
    said = [{"role": "user", "content": "hello"}]
    for count, salt in ((1, "a"), (1, "a"), (2, "b")):
        template.render(said, turns=known.of(salt))
        assert len(known) == count
    for number in range(200):
        template.render([{"role": "user", "content": f"{number}"}], turns=known.of("a"))
        assert known.num_bytes <= 20_000


def test_true_is_not_one() -> None:
    template, known = ChatTemplate(LOOP.format("{{ given }}")), KnownTurns(20_000)
    said = [{"role": "user", "content": "hello"}]
    for given in (True, 1, 1.0, "1", None):
        text = template.render(said, kwargs={"given": given}, turns=known.of(""))
        assert text == str(given)
