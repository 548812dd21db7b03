"""Finds out what a chat template accepts and how it handles thoughts, and fits messages to it.

Templates differ: some want text, some want a list of parts, some differ by role. On an unexpected
form they print nothing, print Python's notation or fail, so each template is probed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jinja2.nodes

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.conversation import Conversation, MediaPart
from vlm_serve.preprocess.text.family import THINK_END, THINK_START

Render = Callable[..., str]
Message = dict[str, Any]
NoContent = Literal["absent", "text", "none"]
CallForm = Literal["qwen3_xml", "minicpm5", "hermes"]

# Words that occur in no template.
_FIRST, _SECOND, _WHOLE, _NAME = "probefirst", "probesecond", "probewhole", "probename"
# Nine letters and digits: some templates accept no other ids.
_CALL: Message = {
    "id": "probe0001",
    "type": "function",
    "function": {"name": _NAME, "arguments": {}},
}


LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The efforts of all APIs, in order; "none" turns thinking off."""
EFFORT, SWITCH = "reasoning_effort", "enable_thinking"
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


@dataclass(frozen=True, slots=True)
class ContentForms:
    """The forms of a message's content that a template renders completely.

    Attributes:
        text: a string.
        parts: a list of parts, however many. If neither is true, only the first part is rendered.
        alike: a list of one part renders like the string; only meaningful if both forms work.
    """

    text: bool = True
    parts: bool = True
    alike: bool = True

    def fit(self, content: Any) -> Any:
        """Return the content, text or parts, in a form that the template renders. Media stay parts.

        A single text part becomes a string if the prompt stays the same.
        """
        if isinstance(content, str):
            return content if self.text else [_text(content)]
        several = len(content) > 1 or not self.alike
        if any(part["type"] != "text" for part in content) or (self.parts and several):
            return content
        joined = "\n".join(part["text"] for part in content)
        return joined if self.text else [_text(joined)]


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Traits of a template: its inputs, and its form of output.

    Attributes:
        variables: the names that it reads but does not set.
        content: the forms of content by role.
        no_content: how to write an answer without content, such as one with only tool calls:
            without the key, with empty text, or with None.
        late_systems: it renders a system message behind other messages where it stands.
        thinking: how it handles thoughts.
        tool_form: the form of tool calls: tags for every parameter, or JSON.
    """

    variables: frozenset[str] = frozenset()
    content: Mapping[str, ContentForms] = field(default_factory=dict)
    no_content: NoContent = "text"
    late_systems: bool = False
    thinking: Thinking = Thinking()
    tool_form: CallForm = "qwen3_xml"

    def effort_variables(self, wanted: str | None) -> dict[str, Any]:
        """Return the variables that set an effort of thinking, as far as the template reads them.

        Args:
            wanted: an effort of any API; None sets nothing.
        """
        if wanted is None:
            return {}
        switch = {SWITCH: wanted != "none"} if SWITCH in self.variables else {}
        effort = effort_for(self.thinking, wanted)
        return switch if effort is None else switch | {"reasoning_effort": effort}

    def fit(self, conversation: Conversation) -> list[Message]:
        """Return the conversation's messages in the template's forms.

        Raises InvalidRequestError, naming the medium, for media in a message that accepts only
        text.
        """
        media = iter(conversation.media)
        return [self._fit(message, media) for message in conversation.messages]

    def fit_turn(self, role: str, text: str) -> Message:
        """Return a text message in the template's form."""
        return {"role": role, "content": self._forms(role).fit(text)}

    def _forms(self, role: str) -> ContentForms:
        return self.content.get(role, ContentForms())

    def _fit(self, message: Message, media: Iterator[MediaPart]) -> Message:
        role, content = message["role"], message["content"]
        if content is None:
            return _without_content(message, self.no_content, self._forms(role))
        forms = self._forms(role)
        if isinstance(content, list):
            found = [next(media) for part in content if part["type"] != "text"]
            if found and forms.text and not forms.parts:
                raise InvalidRequestError(
                    f"{found[0].param}: the chat template takes only text from the role {role}",
                    param=found[0].param,
                )
        return message | {"content": forms.fit(content)}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _without_content(message: Message, how: NoContent, forms: ContentForms) -> Message:
    rest = {key: value for key, value in message.items() if key != "content"}
    return rest if how == "absent" else rest | {"content": forms.fit("") if how == "text" else None}


def find_traits(
    render: Render, tree: jinja2.nodes.Template, variables: frozenset[str], source: str
) -> TemplateTraits:
    """Probe what a template accepts.

    Args:
        render: renders messages; raises InvalidRequestError if the template refuses them.
        tree: its syntax tree, which decides for roles whose probes the template refuses.
        variables: the names that it reads but does not set.
        source: its text, which decides where no tool call is rendered.
    """
    loops = _loops_over_content(tree)
    user = _find_forms(render, loops, "user", [], [])
    question = {"role": "user", "content": user.fit("probe")}
    answer = _find_forms(render, loops, "assistant", [question], [question])
    no_content = _find_no_content(render, question, answer)
    calling = _without_content({"role": "assistant", "tool_calls": [_CALL]}, no_content, answer)
    system = _find_forms(render, loops, "system", [], [question])
    first, second = ({"role": "system", "content": system.fit(w)} for w in (_FIRST, _SECOND))
    answered = {"role": "assistant", "content": answer.fit(_WHOLE)}
    shown = partial(_rendered, render)
    return TemplateTraits(
        variables=variables,
        content={
            "system": system,
            "user": user,
            "assistant": answer,
            "tool": _find_forms(render, loops, "tool", [question, calling], []),
        },
        no_content=no_content,
        late_systems=_in_order(shown([first, question, answered, second, question])),
        thinking=_find_thinking(shown, tree, variables, question),
        tool_form=_find_tool_form(shown([question, calling]), source),
    )


def _in_order(text: str) -> bool:
    return 0 <= text.lower().find(_FIRST) < text.lower().find(_SECOND)


def _find_tool_form(text: str, source: str) -> CallForm:
    """Find the form of tool calls in a text with one, or else in the template's source."""
    if "<function name=" in source and "<param name=" in source:
        return "minicpm5"
    if f"<function={_NAME}>" in text:
        return "qwen3_xml"
    if re.search(rf'"name":\s*"{_NAME}"', text):
        return "hermes"
    tags = "<tool_call>" not in source or "<function=" in source
    return "qwen3_xml" if tags else "hermes"


def _find_forms(
    render: Render, loops: bool, role: str, before: list[Message], after: list[Message]
) -> ContentForms:
    """Find the content forms that work for a role's message between others."""

    def rendered(content: Any) -> str:
        message = {"role": role, "tool_call_id": _CALL["id"], "content": content}
        # Some templates write content in capitals.
        return _rendered(render, [*before, message, *after]).lower()

    # No template reads the key "probe": it shows up only if a part is printed as a Python object.
    first, second = (_text(word) | {"probe": _WHOLE} for word in (_FIRST, _SECOND))
    text, one, two = rendered(_FIRST), rendered([first]), rendered([first, second])
    shows_parts = 0 <= two.find(_FIRST) < two.find(_SECOND) and _WHOLE not in two
    if _FIRST in text or shows_parts or (_FIRST in one and _WHOLE not in one):
        shows_text = _FIRST in text
        alike = text == one or not (shows_text and shows_parts)
        return ContentForms(shows_text, shows_parts, alike)
    # The content is not rendered, or the template refuses all three forms.
    return ContentForms(parts=loops or bool(text or two))


def _find_no_content(render: Render, question: Message, forms: ContentForms) -> NoContent:
    """Find the way to write an answer without content that still renders its calls."""
    ways: tuple[NoContent, ...] = ("absent", "text", "none")
    for way in ways:
        answer = _without_content({"role": "assistant"}, way, forms)
        called = _rendered(render, [question, answer | {"tool_calls": [_CALL]}])
        plain = _rendered(render, [question, answer, question])
        if _NAME in called and plain and "None" not in plain + called:
            return way
    return "text"


def _rendered(render: Render, messages: list[Message], **options: Any) -> str:
    """Return the rendered text, "" if the template refuses the messages."""
    try:
        return render(messages, **options)
    except InvalidRequestError:
        return ""


def _loops_over_content(tree: jinja2.nodes.Template) -> bool:
    """Return True if the template loops over a message's content, directly or indirectly.

    Variables and macro arguments are followed.
    """
    names: set[str] = set()

    def is_content(node: jinja2.nodes.Node | None) -> bool:
        if isinstance(node, jinja2.nodes.Filter | jinja2.nodes.Test):
            return is_content(node.node)
        if isinstance(node, jinja2.nodes.Getitem):
            key = node.arg
            return isinstance(key, jinja2.nodes.Const) and key.value == "content"
        if isinstance(node, jinja2.nodes.Getattr):
            return node.attr == "content"
        return isinstance(node, jinja2.nodes.Name) and node.name in names

    known = -1
    while known < len(names):
        known = len(names)
        for given in tree.find_all(jinja2.nodes.Assign):
            if is_content(given.node) and isinstance(given.target, jinja2.nodes.Name):
                names.add(given.target.name)
        called = {
            call.node.name
            for call in tree.find_all(jinja2.nodes.Call)
            if isinstance(call.node, jinja2.nodes.Name) and any(map(is_content, call.args))
        }
        for macro in tree.find_all(jinja2.nodes.Macro):
            if macro.name in called:
                names |= {argument.name for argument in macro.args}
    return any(is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))


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


def _find_thinking(
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
