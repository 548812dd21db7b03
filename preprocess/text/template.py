"""The checkpoint's chat template: jinja2 in a sandbox, with limits on time and output.

The environment offers what transformers offers to templates (`apply_chat_template`), so a template
renders alike in both. Templates see plain JSON data only: the caller has rebuilt messages and
tools.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from vlm_serve.errors import CheckpointError, ConfigError, InvalidRequestError
from vlm_serve.preprocess.text.template_traits import ContentForms, TemplateTraits, find_traits
from vlm_serve.preprocess.text.tokenizer import read_json

MAX_OUTPUT_CHARACTERS = 1 << 24
MAX_SECONDS = 10.0
_PROBE = "probe"
_RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
)


class _TooSlow(Exception):
    """Rendering passed its deadline. Not a TemplateError, so no template can swallow it."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's text; this extension just prints the body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Checks the deadline whenever a template reads an attribute or an item or calls something."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        self._local = threading.local()
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _SafeNamespace

    def set_deadline(self, deadline: float) -> None:
        self._local.deadline = deadline

    def check_deadline(self) -> None:
        if time.monotonic() > getattr(self._local, "deadline", float("inf")):
            raise _TooSlow

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_deadline()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_deadline()
        return super().getitem(obj, argument)

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        self.check_deadline()
        return super().call(*args, **kwargs)


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
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


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
        found = read_json(directory / name).get("chat_template")
        if isinstance(found, list):
            try:
                found = {entry["name"]: entry["template"] for entry in found}.get("default")
            except (KeyError, TypeError):
                raise CheckpointError(f"chat_template in {name} is no list of templates") from None
        if isinstance(found, str):
            return name, found
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
    ) -> str:
        """Render the prompt text.

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
        try:
            return self._collect(variables)
        except _TooSlow:
            problem = f"takes longer than {self._max_seconds:g} seconds"
        except jinja2.TemplateError as error:
            problem = f"refuses these messages: {error.message}"
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"cannot render these messages ({type(error).__name__})"
        except RecursionError:
            problem = "cannot render messages nested so deeply"
        raise InvalidRequestError(f"the chat template {problem}", param="messages")

    def _collect(self, variables: dict[str, Any]) -> str:
        self._environment.set_deadline(time.monotonic() + self._max_seconds)
        pieces, length = [], 0
        for piece in self._template.generate(variables):
            self._environment.check_deadline()
            pieces.append(piece)
            length += len(piece)
            if length > self._max_output_characters:
                raise jinja2.TemplateError(
                    f"the text is longer than {self._max_output_characters} characters"
                )
        return "".join(pieces)
