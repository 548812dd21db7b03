"""Parameter values of a call in Qwen3.5's form, and the tags at their end or inside them.

`</parameter>` ends a value if another parameter's tag or the end of the call follows.
`</function>` ends a call if `</tool_call>`, another call or the end of the answer follows. If
there is no better ending, text on another line may follow it.

Models omit tags, and values quote them. An ending without omitted tags is better. An ending before
more text counts only until a better one: then the text belongs to the value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vlm_serve.server.answers.pieces import Tools
from vlm_serve.server.answers.tool_values import as_json, begins_json, is_no_text, read, unframed

Given = tuple[str, int, int]
"""A parameter's name, and the start and end of its value."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag in a call.

    Attributes:
        kind: the word, "/function" for `</function>`.
        name: the text after `=`; "": there is none.
        blank: only white space lies between the previous tag and this one.
        next_line: the text between them begins on another line than the previous tag.
    """

    kind: str
    name: str
    start: int
    end: int
    blank: bool
    next_line: bool


@dataclass(frozen=True, slots=True)
class Ending:
    """A possible ending of a call.

    Attributes:
        value: end of the last value.
        closed: the last closing tag.
        end: end of that tag.
        regular: no tag before it is omitted.
    """

    value: int
    closed: Literal["/parameter", "/function", "/tool_call"]
    end: int
    regular: bool


@dataclass(slots=True)
class _Value:
    """The open value.

    Attributes:
        inline: it begins on the line of its tag; None: it is empty so far.
        parts: tags in it that begin another parameter if `</parameter>` was omitted there.
    """

    name: str
    start: int
    inline: bool | None = None
    parts: list[Tag] = field(default_factory=list)


class ValueReader:
    """Reads the tags after a call's first `<parameter=...>`.

    Args:
        schema: schema of all parameters.
        tools: the functions.
        first: the tag that begins the first value.
        nesting: a whole call inside a value is part of it.
        ends_before_text: text may follow a call.

    Attributes:
        nested: a value may contain a whole call.
    """

    def __init__(
        self,
        schema: Mapping[str, Any],
        tools: Tools,
        first: Tag,
        *,
        nesting: bool,
        ends_before_text: bool,
    ) -> None:
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._closed_schema = schema.get("additionalProperties") is False and not schema.get(
            "patternProperties"
        )
        required = schema.get("required")
        self._required = set(required) if isinstance(required, list) else set()
        self._tools = tools
        self._nesting, self._ends_before_text = nesting, ends_before_text
        self.nested = False
        self._given: list[Given] = []
        self._names: set[str] = set()
        self._value = _Value(first.name, first.end)
        self._ending: Ending | None = None  # extended by each closing tag that follows directly
        self._earlier: Ending | None = None  # the best one that text follows
        self._unclosed: Ending | None = None  # text follows it, and `</tool_call>` was omitted
        self._shape = ""  # tags so far of a possible call in the value
        self._inner: list[bool] = []  # open calls in the value; True: with `<tool_call>`
        self._inner_closed = False

    def skip(self, plain: str) -> None:
        """Read text between tags."""
        if self._value.inline is None:
            self._value.inline = plain[0] not in "\r\n"

    def take(self, tag: Tag, fresh_line: bool) -> Ending | None:
        """Read the next tag; return the call's ending once it is certain.

        Args:
            fresh_line: the tag is the first one of its line.
        """
        shape, self._shape = self._shape, self._shape_with(tag)
        if self._value.inline is None:
            self._value.inline = True
        opens = shape.endswith("function") and tag.blank and fresh_line
        opens = opens and tag.kind in ("parameter", "/function")
        if self._inner or (opens and self._nesting):
            self._take_inner(tag, shape if opens else "")
            return None
        second = shape == "call" and tag.blank and tag.kind == "function"
        if not tag.blank or (shape == "call" and not second):
            self._text_follows(tag.next_line)
        if tag.kind == "function":
            return self._function(tag, second, fresh_line)
        if tag.kind == "/think":
            return self._best(self._ending)
        if tag.kind == "parameter":
            self._parameter(tag, fresh_line)
        elif tag.kind != "tool_call":
            self._close(tag)
        elif self._ending is not None and self._ending.closed == "/parameter":
            self._text_follows(tag.next_line)
        return None

    def end(self, blank: bool, next_line: bool, *, cut: bool) -> Ending | None:
        """Return the call's ending if nothing follows; None: it has none.

        Args:
            blank: only white space follows the last tag.
            next_line: the text after it begins on another line.
            cut: the token limit ended the text, so an open call may be incomplete.
        """
        if not blank:
            self._text_follows(next_line)
        best = self._best(self._ending)
        if cut or self._inner:
            return best if best is not None and best.regular else None
        if best is None and self._ending is not None and self._has_required(self._ending):
            return self._ending
        return best or self._unclosed

    def values(self, ending: Ending) -> list[Given]:
        """Return all values of the call if it ends there."""
        return self._given + self._divided(ending.value)

    def _has_required(self, ending: Ending) -> bool:
        """Return True if the call has all required parameters when it ends there."""
        return self._required <= {name for name, *_ in self.values(ending)}

    def unfinished(self, size: int) -> list[Given]:
        """Return the values of an incomplete call, the open one last.

        Args:
            size: length of the text.
        """
        end = size if self._ending is None else self._ending.value
        return [*self._given, (self._value.name, self._value.start, end)]

    def _shape_with(self, tag: Tag) -> str:
        """Return the tags of a possible call in the value after this tag."""
        if tag.kind == "function":
            return "call function" if self._shape == "call" and tag.blank else "function"
        return "call" if tag.kind == "tool_call" else ""

    def _take_inner(self, tag: Tag, opening: str) -> None:
        """Read a tag of a quoted call inside the value."""
        self._ending = None
        if opening:
            self.nested = True
            self._inner.append(opening.startswith("call"))
        closed, self._inner_closed = self._inner_closed and tag.blank, False
        if tag.kind == "/function":
            if self._inner[-1]:
                self._inner_closed = True
            else:
                self._inner.pop()
        elif tag.kind == "/tool_call" and closed:
            self._inner.pop()

    def _text_follows(self, next_line: bool) -> None:
        """Decide on the current ending, since text follows it."""
        ending, self._ending = self._ending, None
        if ending is None:
            return
        if ending.closed == "/tool_call" and self._ends_before_text:
            self._earlier = self._best(ending)
        elif ending.closed == "/function" and ending.regular and next_line:
            self._unclosed = self._unclosed or ending
        elif ending.closed == "/parameter" and self._value.parts:
            self._value.parts.pop()  # both tags belong to the value

    def _best(self, ending: Ending | None) -> Ending | None:
        """Return the better of an ending and the earlier one, if a call may end there."""
        if ending is None or ending.closed == "/parameter":
            return self._earlier
        if self._earlier is not None and not ending.regular:
            return self._earlier
        return ending

    def _function(self, tag: Tag, second: bool, fresh_line: bool) -> Ending | None:
        """Read the start of another call.

        Args:
            tag: `<function=...>`.
            second: it follows `<tool_call>`.
            fresh_line: see `take`.
        """
        ending, self._ending = self._ending, None
        known = tag.name in self._tools
        if known and (second or fresh_line) and not (ending or self._earlier):
            return self._unclosed
        if second:
            self._earlier = best = self._best(ending)
            return best if best is not None and (known or best.regular) else None
        if ending is not None and ending.closed != "/parameter" and (known or ending.regular):
            self._earlier = self._best(ending)
            return self._earlier if known else None
        return None

    def _parameter(self, tag: Tag, fresh_line: bool) -> None:
        """Read the start of another parameter, or of text in the value."""
        ending, self._ending = self._ending, None
        value, known = self._value, tag.name in self._properties
        if ending is not None and ending.closed == "/parameter":
            if known or not self._closed_schema:
                if any(tag.name == part.name for part in value.parts):
                    value.parts.clear()
                self._give(ending.value)
                self._value = _Value(tag.name, tag.end)
                self._earlier = self._unclosed = None
        elif known and (fresh_line or value.inline):
            taken = {value.name, *(part.name for part in value.parts)}
            if tag.name not in self._names and tag.name not in taken:
                value.parts.append(tag)

    def _give(self, end: int) -> None:
        """End the open value."""
        given = self._divided(end)
        self._given += given
        self._names.update(name for name, *_ in given)

    def _close(self, tag: Tag) -> None:
        """Read a closing tag."""
        ending = self._ending
        if ending is not None and ending.closed == "/tool_call":
            self._earlier, ending = self._best(ending), None
        self._ending = None
        if tag.kind == "/parameter":
            self._ending = Ending(tag.start, "/parameter", tag.end, regular=True)
        elif tag.kind == "/function":
            if ending is not None and ending.closed == "/parameter":
                self._ending = replace(ending, closed="/function", end=tag.end)
            else:
                self._ending = Ending(tag.start, "/function", tag.end, regular=False)
        elif ending is not None:
            regular = ending.regular and ending.closed == "/function"
            self._ending = Ending(ending.value, "/tool_call", tag.end, regular)

    def _divided(self, end: int) -> list[Given]:
        """Return the open value, split at parameters with an omitted `</parameter>`."""
        parts = [part for part in self._value.parts if part.end <= end]
        names = [self._value.name, *(part.name for part in parts)]
        starts = [self._value.start, *(part.end for part in parts)]
        ends = [*(part.start for part in parts), end]
        return list(zip(names, starts, ends, strict=True))


def complete(text: str, given: Iterable[Given], schema: Mapping[str, Any]) -> str:
    """Return the arguments of a call as JSON; the first of duplicate parameters counts."""
    return "{" + ", ".join(_members(text, given, schema).values()) + "}"


def unfinished(text: str, given: list[Given], schema: Mapping[str, Any]) -> str:
    """Return the arguments of a call cut in its last value, as a prefix of JSON."""
    if not given:
        return "{"
    members = _members(text, given[:-1], schema)
    name, start, end = given[-1]
    if name not in members:
        value = unframed(text[start:end])
        written = json.dumps(value, ensure_ascii=False)[:-1]
        if is_no_text(_property(schema, name), schema):
            written = value.strip() if begins_json(value) else ""
        members[name] = f"{json.dumps(name)}: {written}"
    return "{" + ", ".join(members.values())


def _members(text: str, given: Iterable[Given], schema: Mapping[str, Any]) -> dict[str, str]:
    members: dict[str, str] = {}
    for name, start, end in given:
        if name not in members:
            value = read(text[start:end], _property(schema, name), schema)
            members[name] = f"{json.dumps(name)}: {as_json(value)}"
    return members


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None
