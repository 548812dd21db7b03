"""The required form of an answer, validated on construction and compiled later."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vlm_serve.errors import FieldError, InvalidRequestError
from vlm_serve.options.declared import explains_keywords

MAX_SOURCE_LENGTH = 1 << 16
MAX_CHOICES = 1024
MAX_DEPTH = 64

Schema = Mapping[str, Any] | bool


@explains_keywords
@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form of an answer: exactly one field but `strict` is set.

    Attributes:
        json: a JSON schema, as an object or as its text.
        json_object: any JSON object.
        regex: a regular expression for the whole answer.
        choice: the answer is one of these texts.
        grammar: a grammar in EBNF; the start rule is `root`.
        structural_tag: a structural tag, as an object or as its text.
        strict: refuse unknown schema keywords instead of ignoring them.

    Raises:
        InvalidRequestError: names the field and its bound.
    """

    json: Schema | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        given = [
            field.name
            for field in fields(self)
            if field.name != "strict" and getattr(self, field.name) not in (None, False)
        ]
        if self.json is False:
            raise _refuse("json", "is false, which no answer can satisfy")
        if len(given) != 1:
            shown = ", ".join(given) or "none"
            raise InvalidRequestError(
                "structured_outputs needs exactly one of json, json_object, regex, choice, "
                f"grammar and structural_tag, got {shown}",
                param="structured_outputs",
            )
        self._check_texts()
        for name in ("json", "structural_tag"):
            self._check_object(name)

    def _check_texts(self) -> None:
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str) or not value:
                raise _refuse(name, "must be a text that is not empty")
            _check_length(name, value)
            _check_nesting(name, value)
        if self.choice is None:
            return
        if not isinstance(self.choice, tuple) or not 1 <= len(self.choice) <= MAX_CHOICES:
            raise _refuse("choice", f"must have at least 1 and at most {MAX_CHOICES} texts")
        if any(not isinstance(text, str) or not text for text in self.choice):
            raise _refuse("choice", "must be texts that are not empty")
        _check_length("choice", "".join(self.choice))

    def _check_object(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, str):
            _check_length(name, value)
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise _refuse(name, "is not valid JSON") from None
            object.__setattr__(self, name, value)
        if not isinstance(value, Mapping) and not (name == "json" and value is True):
            raise _refuse(name, "must be an object")
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise _refuse(name, "is not plain JSON") from None
        _check_length(name, text)
        _check_depth(name, value)

    @property
    def source(self) -> tuple[str, str]:
        """(kind, text) for the grammar compiler; equal for equal forms."""
        if self.json is not None:
            return "json", json.dumps(self.json)
        if self.json_object:
            return "json", '{"type": "object"}'
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "choice", json.dumps(self.choice)
        if self.grammar is not None:
            return "grammar", self.grammar
        return "structural_tag", json.dumps(self.structural_tag)


def _refuse(name: str, problem: str) -> FieldError:
    return FieldError(f"structured_outputs.{name}", problem)


def _check_length(name: str, text: str) -> None:
    if len(text) > MAX_SOURCE_LENGTH:
        raise _refuse(name, f"is longer than {MAX_SOURCE_LENGTH} characters")


def _check_nesting(name: str, text: str) -> None:
    """Refuse deep nesting, since parsers recurse. Quoted brackets count too: it is coarse."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    if deepest > MAX_DEPTH:
        raise _refuse(name, f"is nested deeper than {MAX_DEPTH} levels")


def _check_depth(name: str, value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for inner in level:
            if isinstance(inner, Mapping):
                deeper += inner.values()
            elif isinstance(inner, list | tuple):
                deeper += inner
        if not deeper:
            return
        level = deeper
    raise _refuse(name, f"is nested deeper than {MAX_DEPTH} levels")
