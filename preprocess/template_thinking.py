"""Finds out how a chat template handles thoughts and the effort of thinking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jinja2.nodes

from vlm_serve.preprocess.thoughts import THINK_END, THINK_START

LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The efforts of all APIs, in order; "none" turns thinking off."""
EFFORT, SWITCH = "reasoning_effort", "enable_thinking"
Message = dict[str, Any]
Shown = Callable[..., str]
"""Renders messages with the keywords of `ChatTemplate.render`; "" if the template refuses them."""
Opening = Literal["none", "opens", "closes"]
_UNKNOWN, _REASON, _ANSWER = "probeeffort", "probereason", "probeanswer"
_SWITCHED: dict[str, dict[str, Any]] = {
    "default": {},
    "on": {SWITCH: True},
    "off": {SWITCH: False},
}


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a template handles thoughts.

    Attributes:
        marked: it knows thoughts between `<think>` and `</think>`.
        prompt: what the generation prompt does to a thought, with `enable_thinking` "on", "off" and
            by "default".
        efforts: values of `reasoning_effort` that it takes, lowest first; empty if it reads none.
    """

    marked: bool = False
    prompt: Mapping[str, Opening] = field(default_factory=dict)
    efforts: tuple[str, ...] = ()


def effort_for(thinking: Thinking, wanted: str) -> str | None:
    """Return the template's effort for one of any API; None if the template takes none like it.

    It is the next higher one, or else the highest. Thinking is off at "none": only a template with
    that very value takes it.
    """
    if wanted in thinking.efforts:
        return wanted
    if wanted not in LEVELS[1:]:
        return None
    ranks = [LEVELS.index(each) for each in thinking.efforts if each in LEVELS[1:]]
    if not ranks:
        return None
    higher = [rank for rank in ranks if rank > LEVELS.index(wanted)]
    return LEVELS[min(higher) if higher else max(ranks)]


def find_thinking(
    shown: Shown, tree: jinja2.nodes.Template, variables: frozenset[str], question: Message
) -> Thinking:
    """Probe a template for thoughts.

    Args:
        shown: renders messages.
        tree: the template's syntax tree.
        variables: the names that it reads.
        question: a user's message in its form.
    """
    prompt = {name: _opening(shown, question, given) for name, given in _SWITCHED.items()}
    return Thinking(
        marked=any(each != "none" for each in prompt.values()) or _knows(shown, question),
        prompt=prompt,
        efforts=_efforts(shown, tree, question) if EFFORT in variables else (),
    )


def _opening(shown: Shown, question: Message, given: Mapping[str, Any]) -> Opening:
    """Return what the generation prompt does to a thought."""
    asked = shown([question], add_generation_prompt=False, kwargs=given)
    prompt = shown([question], kwargs=given).removeprefix(asked)
    start, end = prompt.rfind(THINK_START), prompt.rfind(THINK_END)
    return "none" if start == end else "opens" if start > end else "closes"


def _knows(shown: Shown, question: Message) -> bool:
    """Return True if the template writes an answer's thought, or leaves out one in its text."""
    answer = {"role": "assistant", "content": _ANSWER}
    text = shown([question, answer | dict.fromkeys(("reasoning_content", "thinking"), _REASON)])
    start, reason, end = (text.find(each) for each in (THINK_START, _REASON, THINK_END))
    if 0 <= start < reason < end:
        return True
    answer["content"] = f"{THINK_START}\n{_REASON}\n{THINK_END}\n\n{_ANSWER}"
    text = shown([question, answer, question])
    return _ANSWER in text and _REASON not in text


def _efforts(shown: Shown, tree: jinja2.nodes.Template, question: Message) -> tuple[str, ...]:
    def taken(effort: str) -> bool:
        return bool(shown([question], kwargs={EFFORT: effort, SWITCH: True}))

    named = {*_compared(tree)}
    candidates = [*LEVELS, *sorted(named - {*LEVELS})]
    if taken(_UNKNOWN):  # It takes any text: what it compares with is what it knows.
        return tuple(each for each in candidates if each in named) or LEVELS
    return tuple(each for each in candidates if taken(each))


def _compared(tree: jinja2.nodes.Template) -> Iterator[str]:
    """Yield the texts with which the effort is compared, under any of its names."""
    names = {EFFORT}
    known = 0
    while known < len(names):
        known = len(names)
        for given in tree.find_all(jinja2.nodes.Assign):
            if isinstance(given.target, jinja2.nodes.Name) and _reads(given.node, names):
                names.add(given.target.name)
    for compared in tree.find_all(jinja2.nodes.Compare):
        if _reads(compared.expr, names):
            for operand in compared.ops:
                yield from _texts(operand)
    for item in tree.find_all(jinja2.nodes.Getitem):
        if _reads(item.arg, names) and isinstance(item.node, jinja2.nodes.Dict):
            for pair in item.node.items:
                yield from _texts(pair.key)


def _reads(node: jinja2.nodes.Node, names: set[str]) -> bool:
    """Return True if an expression is one of the names, perhaps through filters."""
    while isinstance(node, jinja2.nodes.Filter) and node.node is not None:
        node = node.node
    return isinstance(node, jinja2.nodes.Name) and node.name in names


def _texts(node: jinja2.nodes.Node) -> Iterator[str]:
    constants = [node] if isinstance(node, jinja2.nodes.Const) else []
    for constant in (*constants, *node.find_all(jinja2.nodes.Const)):
        if isinstance(constant.value, str):
            yield constant.value
