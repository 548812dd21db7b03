"""The checkpoint's chat template: jinja2 in a sandbox, with limits on time and output.

The environment offers what transformers offers to templates (`apply_chat_template`), so a template
renders alike in both. Templates see plain JSON data only: the caller has rebuilt messages and
tools.

Templates differ: some want text, some want a list of parts, some differ by role. On an unexpected
form they print nothing, print Python's notation or fail. So `find_traits` probes what a template
accepts and how it handles thoughts, and `TemplateTraits` fits messages to it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.utils

from vlm_serve.errors import CheckpointError, ConfigError, InvalidRequestError
from vlm_serve.preprocess.reading.conversation import Conversation, MediaPart, text_part
from vlm_serve.preprocess.text.family import THINK_END, THINK_START
from vlm_serve.preprocess.text.known_turns import TurnCompiler, Turns, rewrite
from vlm_serve.preprocess.text.sandbox import Sandbox, TooMuchError
from vlm_serve.preprocess.text.sandbox import TooSlowError as _TooSlow
from vlm_serve.preprocess.text.tokenizer import read_json

MAX_OUTPUT_CHARACTERS = 1 << 24
MAX_SECONDS = 10.0
_MAX_MESSAGE = 1000
_LIMIT = "template_limit"
_PROBE = "probe"
_RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's text; this extension just prints the body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Environment(Sandbox):
    """The sandbox with what transformers offers to templates."""

    code_generator_class = TurnCompiler

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _SafeNamespace


class _SafeNamespace(jinja2.utils.Namespace):
    """A namespace without underscore names, which would give access to the object's internals."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        for name in (values := dict(*args, **kwargs)):
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name!r} cannot be a namespace attribute")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump JSON without jinja's HTML escapes, with transformers' signature."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message)[:_MAX_MESSAGE])


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format[:_MAX_MESSAGE])


def named_chat_template(directory: Path | str) -> tuple[str, str]:
    """Return the file with a folder's default chat template, and its source; "" and "" for none.

    Looks in transformers' order: chat_template.jinja, chat_template.json, tokenizer_config.json.
    Raises CheckpointError if a file exists but is unreadable.
    """
    directory, name = Path(directory), "chat_template.jinja"
    try:
        return name, (directory / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        raise CheckpointError(f"{name} of the checkpoint cannot be read") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(directory / name).get("chat_template")
        if isinstance(template, list):
            try:
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
            except (KeyError, TypeError):
                raise CheckpointError(f"chat_template in {name} is no list of templates") from None
        if isinstance(template, str):
            return name, template
    return "", ""


def load_template(
    file: Path | str, special_names: Mapping[str, str], defaults: Mapping[str, Any] | None
) -> ChatTemplate:
    """Load the template that an operator gives instead of the checkpoint's.

    Raises ConfigError, naming the file, if it cannot be read, does not compile, or does not render
    one message of a user.
    """
    try:
        source = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        problem = f"cannot be read: {error.strerror or type(error).__name__}"
    except ValueError:
        problem = "is not UTF-8 text"
    else:
        problem = ""
        try:
            template = ChatTemplate(source, special_names, defaults)
            forms = template.traits.content.get("user", ContentForms())
            if _PROBE in template.render([{"role": "user", "content": forms.fit(_PROBE)}]):
                return template
            problem = "does not render a user's message"
        except InvalidRequestError as error:
            problem = f"does not render a user's message: {error.message}"
        except CheckpointError as error:
            problem = f"is no chat template: {error.message}"
    raise ConfigError(f"chat_template: {file} {problem}", param="chat_template")


class ChatTemplate:
    """A compiled chat template. Thread-safe.

    Args:
        source: jinja2 source; "" for a checkpoint without a template: then nothing can be rendered.
        special_names: "eos_token" and the like, visible to the template.
        defaults: values of further variables; those of a request take precedence.
        max_output_characters, max_seconds: limits of one rendering.

    Attributes:
        variables: the names that the template reads but does not set.

    Raises CheckpointError if the source does not compile, ConfigError for a default that cannot be
    set.
    """

    def __init__(
        self,
        source: str,
        special_names: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        *,
        max_output_characters: int = MAX_OUTPUT_CHARACTERS,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        self._environment = _Environment()
        self._special_names = dict(special_names or {})
        self._max_output_characters = max_output_characters
        self._max_seconds = max_seconds
        self.source = source
        try:
            self._template = self._environment.from_string(source)
            self._tree = self._environment.parse(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from None
        turning = self._environment.parse(source)
        self._turning = self._environment.from_string(turning) if rewrite(turning) else None
        # The search folds constants in its tree.
        tree = self._environment.parse(source)
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        self._defaults = dict(defaults or {})
        try:
            self.check_kwargs(self._defaults)
        except InvalidRequestError as error:
            raise ConfigError(error.message, param=error.param) from None

    @cached_property
    def traits(self) -> TemplateTraits:
        """Traits of the template, probed on first access."""
        if not self.source:
            return TemplateTraits()
        return find_traits(self.render, self._tree, self.variables, self.source)

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Check the names of further variables.

        Raises InvalidRequestError for names reserved for the server or the template's environment.
        """
        taken = _RESERVED | self._environment.globals.keys() | self._special_names.keys()
        for name in kwargs:
            if name in taken or not name.isidentifier():
                raise InvalidRequestError(
                    f"{name!r} cannot be set through chat_template_kwargs",
                    param="chat_template_kwargs",
                )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        turns: Turns | None = None,
    ) -> str:
        """Render the prompt text.

        Args:
            turns: the tenant's known turns; None: none is known.

        Raises InvalidRequestError if the template refuses the messages or a limit is exceeded.
        """
        if not self.source:
            raise InvalidRequestError("this model has no chat template", param="messages")
        variables = {
            **self._special_names,
            **self._defaults,
            **(kwargs or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        variables.setdefault("documents", None)
        template = self._template
        if turns is not None and self._turning is not None:
            template = self._turning
            variables |= turns.variables
        code: str | None = None
        try:
            return self._collect(template, variables)
        except _TooSlow:
            problem, code = f"takes longer than {self._max_seconds:g} seconds", _LIMIT
        except jinja2.TemplateError as error:
            code = _LIMIT if isinstance(error, TooMuchError) else None
            problem = f"refuses these messages: {error.message}"
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"cannot render these messages ({type(error).__name__})"
        except MemoryError:
            problem, code = "takes too much memory", _LIMIT
        except RecursionError:
            problem = "cannot render messages nested so deeply"
        raise InvalidRequestError(f"the chat template {problem}", param="messages", code=code)

    def _collect(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        self._environment.set_deadline(time.monotonic() + self._max_seconds)
        pieces, length = [], 0
        for piece in template.generate(variables):
            self._environment.check_deadline()
            pieces.append(piece)
            length += len(piece)
            if length > self._max_output_characters:
                raise jinja2.TemplateError(
                    f"the text is longer than {self._max_output_characters} characters"
                )
        return "".join(pieces)


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
            return content if self.text else [text_part(content)]
        several = len(content) > 1 or not self.alike
        if any(part["type"] != "text" for part in content) or (self.parts and several):
            return content
        joined = "\n".join(part["text"] for part in content)
        return joined if self.text else [text_part(joined)]


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
        separator: white space that it writes between `</think>` and an answer's text or calls.
        tool_form: the form of tool calls: tags for every parameter, or JSON.
    """

    variables: frozenset[str] = frozenset()
    content: Mapping[str, ContentForms] = field(default_factory=dict)
    no_content: NoContent = "text"
    late_systems: bool = False
    thinking: Thinking = Thinking()
    separator: str = ""
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
            nontext = [next(media) for part in content if part["type"] != "text"]
            if nontext and forms.text and not forms.parts:
                raise InvalidRequestError(
                    f"{nontext[0].param}: the chat template takes only text from the role {role}",
                    param=nontext[0].param,
                )
        return message | {"content": forms.fit(content)}


def _without_content(message: Message, how: NoContent, forms: ContentForms) -> Message:
    rest = {key: value for key, value in message.items() if key != "content"}
    return rest if how == "absent" else rest | {"content": forms.fit("") if how == "text" else None}


def find_traits(
    render: Callable[..., str], tree: jinja2.nodes.Template, variables: frozenset[str], source: str
) -> TemplateTraits:
    """Probe what a template accepts.

    Args:
        render: renders messages; raises InvalidRequestError if the template refuses them.
        tree: its syntax tree, which decides for roles whose probes the template refuses.
        variables: the names that it reads but does not set.
        source: its text, which decides where no tool call is rendered.
    """
    shown = partial(_rendered, render)
    loops = _loops_over_content(tree)
    user = _find_forms(shown, loops, "user", [], [])
    question = {"role": "user", "content": user.fit("probe")}
    answer = _find_forms(shown, loops, "assistant", [question], [question])
    no_content = _find_no_content(shown, question, answer)
    calling = _without_content({"role": "assistant", "tool_calls": [_CALL]}, no_content, answer)
    system = _find_forms(shown, loops, "system", [], [question])
    first, second = ({"role": "system", "content": system.fit(w)} for w in (_FIRST, _SECOND))
    answered = {"role": "assistant", "content": answer.fit(_WHOLE)}
    return TemplateTraits(
        variables=variables,
        content={
            "system": system,
            "user": user,
            "assistant": answer,
            "tool": _find_forms(shown, loops, "tool", [question, calling], []),
        },
        no_content=no_content,
        late_systems=_in_order(shown([first, question, answered, second, question])),
        thinking=_find_thinking(shown, tree, variables, question),
        separator=_separator(shown, question, calling),
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
    shown: Shown, loops: bool, role: str, before: list[Message], after: list[Message]
) -> ContentForms:
    """Find the content forms that work for a role's message between others."""

    def rendered(content: Any) -> str:
        message = {"role": role, "tool_call_id": _CALL["id"], "content": content}
        # Some templates write content in capitals.
        return shown([*before, message, *after]).lower()

    # No template reads the key "probe": it shows up only if a part is printed as a Python object.
    first, second = (text_part(word) | {"probe": _WHOLE} for word in (_FIRST, _SECOND))
    text, one, two = rendered(_FIRST), rendered([first]), rendered([first, second])
    shows_parts = 0 <= two.find(_FIRST) < two.find(_SECOND) and _WHOLE not in two
    if _FIRST in text or shows_parts or (_FIRST in one and _WHOLE not in one):
        shows_text = _FIRST in text
        alike = text == one or not (shows_text and shows_parts)
        return ContentForms(shows_text, shows_parts, alike)
    # The content is not rendered, or the template refuses all three forms.
    return ContentForms(parts=loops or bool(text or two))


def _find_no_content(shown: Shown, question: Message, forms: ContentForms) -> NoContent:
    """Find the way to write an answer without content that still renders its calls."""
    ways: tuple[NoContent, ...] = ("absent", "text", "none")
    for way in ways:
        answer = _without_content({"role": "assistant"}, way, forms)
        called = shown([question, answer | {"tool_calls": [_CALL]}])
        plain = shown([question, answer, question])
        if _NAME in called and plain and "None" not in plain + called:
            return way
    return "text"


def _rendered(render: Callable[..., str], messages: list[Message], **options: Any) -> str:
    """Return the rendered text, "" if the template refuses the messages.

    Raises CheckpointError for one that exceeds a limit: it would with any messages.
    """
    try:
        return render(messages, **options)
    except InvalidRequestError as error:
        if error.code == _LIMIT:
            raise CheckpointError(error.message) from None
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
    ranks = [LEVELS.index(effort) for effort in thinking.efforts if effort in LEVELS[1:]]
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
        marked=any(opening != "none" for opening in prompt.values()) or _knows(shown, question),
        prompt=prompt,
        efforts=_efforts(shown, tree, question) if EFFORT in variables else (),
    )


def _separator(shown: Shown, question: Message, calling: Message) -> str:
    """Return the white space with which texts and calls begin behind a thought.

    A template that shows no thought of an answer may close an empty one in its generation prompt.
    """
    reasons = dict.fromkeys(("reasoning_content", "thinking"), _REASON)
    answers = ({"role": "assistant", "content": _ANSWER}, calling)
    asked = (shown([question, answer | reasons], add_generation_prompt=False) for answer in answers)
    behind = [text.rpartition(THINK_END)[2] for text in asked if THINK_END in text]
    behind = behind or [shown([question], kwargs=_SWITCHED["off"]).rpartition(THINK_END)[2]]
    spaces = [text[: len(text) - len(text.lstrip())] for text in behind]
    return os.path.commonprefix(spaces)


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
    start, reason, end = (text.find(word) for word in (THINK_START, _REASON, THINK_END))
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
        return tuple(effort for effort in candidates if effort in named) or LEVELS
    return tuple(effort for effort in candidates if taken(effort))


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
