"""Arguments of a call in tags, as JSON: values that have ended, and the open one as it grows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from vlm_serve.grammar.kinds import kinds_of_parameter
from vlm_serve.grammar.references import Document
from vlm_serve.preprocess.reading.values import begins_json
from vlm_serve.server.answers.call_forms import Framing
from vlm_serve.server.answers.call_reader import HELD
from vlm_serve.server.answers.tool_values import (
    as_json,
    enforced_json,
    is_enforced_text,
    is_no_text,
    is_plain_text,
    read,
    unframed,
)

Given = tuple[str, str]
"""A parameter's name and the text of its value."""

_RAW = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)
_FRAME_END = {
    "line": re.compile(r"\r?\n?\Z"),
    "space": re.compile(r"\s*\Z"),
    "raw": re.compile(r"\Z"),
}


class Arguments:
    """Arguments that are read one after the other; the first of duplicate parameters counts.

    Args:
        schema: schema of all parameters.
        framing: see `Framing`.
        enforced: a grammar enforces the schema, so a value has one reading.
    """

    def __init__(
        self, schema: Mapping[str, Any], framing: Framing, *, enforced: bool = False
    ) -> None:
        self._schema, self._framing = schema, framing
        self._document = Document(schema) if enforced else None
        self._members: dict[str, str] = {}
        self._name = ""
        self._frame = ""
        self._waiting: list[str] = []  # text of the open value that has not been told
        self._length = 0
        self._is_text: bool | None = None  # the open value is text for certain; None: undecided
        self._told = 0  # length of what has been told

    @property
    def names(self) -> set[str]:
        return set(self._members)

    def give(self, given: Iterable[Given]) -> None:
        """Add values that have ended."""
        for name, text in given:
            if name not in self._members:
                self._members[name] = self._member(name, text)

    def begin(self, name: str) -> None:
        """Open the next value."""
        self._name, self._frame, self._is_text = name, self._framing, None
        self._waiting, self._length = [], 0

    def begin_raw(self) -> None:
        """Begin a CDATA section at the start of the open value."""
        self._waiting, self._length, self._frame = [], 0, "raw"

    def grow(self, text: str) -> None:
        """Add text to the open value. It may still turn out not to belong to it."""
        if self._is_text is not False:
            self._waiting.append(text)
            self._length += len(text)

    def certain(self) -> str:
        """Return more of the arguments: all text so far belongs to the open value."""
        if self._is_text is False or (self._is_text is None and self._length < HELD):
            return ""
        begun, text = "", "".join(self._waiting)
        if self._is_text is None:
            begun, text = self._begin_text(text)
            if not self._is_text:
                return ""
        end = _FRAME_END[self._frame].search(text)
        assert end is not None
        self._waiting = [text[end.start() :]]
        begun += as_json(text[: end.start()])[1:-1]
        self._told += len(begun)
        return begun

    def _begin_text(self, text: str) -> tuple[str, str]:
        """Decide whether the open value is text for certain.

        Return the arguments up to it, less what has been told, and the text without its frame.
        """
        schema, name = _property(self._schema, self._name), json.dumps(self._name)
        start = text[:HELD] if self._frame == "raw" else text[:HELD].strip()
        if self._document is not None:
            is_text = is_enforced_text(text[1:HELD], kinds_of_parameter(self._document, self._name))
        else:
            is_text = is_plain_text(schema, self._schema, start, HELD)
        self._is_text = is_text and self._name not in self._members
        if self._frame == "line":
            text = text[2:] if text.startswith("\r\n") else text.removeprefix("\n")
        elif self._frame == "space":
            text = text.lstrip()
        opened = "{" + ", ".join([*self._members.values(), f'{name}: "'])
        return opened[self._told :], text

    def complete(self, given: Iterable[Given]) -> str:
        """Return all arguments, with the last values."""
        self.give(given)
        return "{" + ", ".join(self._members.values()) + "}"

    def unfinished(self, text: str | None) -> str:
        """Return the arguments of a call that ends in its last value, as a prefix of JSON.

        Args:
            text: the open value's text; None: there is no value.
        """
        members, name = list(self._members.values()), self._name
        if text is not None and name not in self._members:
            value = unframed(text)
            if self._frame == "raw":
                value = text.lstrip().removeprefix("<![CDATA[")
            elif self._frame == "space":
                value = text.strip()
            written = as_json(value)[:-1]
            if self._takes_no_text(name):
                written = value.strip() if begins_json(value) else ""
            members.append(f"{json.dumps(name)}: {written}")
        return "{" + ", ".join(members)

    def _takes_no_text(self, name: str) -> bool:
        if self._document is not None:
            return "string" not in kinds_of_parameter(self._document, name)
        return is_no_text(_property(self._schema, name), self._schema)

    def _member(self, name: str, text: str) -> str:
        if self._document is not None:
            kinds = kinds_of_parameter(self._document, name)
            return f"{json.dumps(name)}: {enforced_json(unframed(text), kinds)}"
        raw = _RAW.fullmatch(text) if self._framing == "space" else None
        exact = raw.group(1) if raw else text.strip() if self._framing == "space" else None
        value = read(text, _property(self._schema, name), self._schema, exact=exact)
        return f"{json.dumps(name)}: {as_json(value)}"


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None
