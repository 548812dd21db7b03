"""Actions for tool calls in tags.

<tool_call>
<function=name>
<parameter=key>
value
</parameter>
</function>
</tool_call>

Values are not escaped, so a tag in one may belong to the form or to the value. Models omit tags,
and values quote them. An ending without omitted tags is better. An ending before more text counts
only until a better one: then the text belongs to the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vlm_serve.grammar.kinds import kinds_of_parameter
from vlm_serve.grammar.references import Document
from vlm_serve.preprocess.reading.values import begins_json
from vlm_serve.server.answers.call_reader import ENFORCED, FORMS, HELD, CallReader, Framing, Mark
from vlm_serve.server.answers.pieces import TOOL_START, ParsedCall, Reading, ToolForm, Tools
from vlm_serve.server.answers.tool_values import (
    as_json,
    enforced_json,
    is_enforced_text,
    is_no_text,
    is_plain_text,
    read,
    unframed,
)


@dataclass(frozen=True, slots=True)
class _Ending:
    """A possible ending of a call.

    Attributes:
        value: end of the last value.
        end: end of the last closing tag.
        regular: no tag before it is omitted.
        state: the state behind that tag.
    """

    value: int
    end: int
    regular: bool
    state: str


@dataclass(slots=True)
class _Value:
    """The open value.

    Attributes:
        raw: it is a CDATA section.
        inline: it begins on the line of its tag; None: it is empty so far.
        parts: tags in it that begin another parameter if a closing tag was omitted there.
    """

    name: str
    start: int
    raw: bool = False
    inline: bool | None = None
    parts: list[Mark] = field(default_factory=list)


class TagReader(CallReader):
    """Reads one call.

    Args:
        nesting: a whole call inside a value is part of it.
        ends_before_text: text may follow a call.
    """

    def __init__(
        self,
        form: ToolForm,
        tools: Tools,
        *,
        nesting: bool = True,
        ends_before_text: bool = True,
        **options: bool,
    ) -> None:
        super().__init__(tools, **options)
        self._form_name = form
        self._form = (ENFORCED if self._enforced else FORMS)[form]
        self._nesting, self._ends_before_text = nesting, ends_before_text
        self._blank = True  # only white space since the last tag
        self._next_line = False  # a line break in that white space
        self._fresh_line = False  # the next tag is the first one of its line
        self._behind = 0  # end of the last tag
        self._name = ""
        self._schema: Mapping[str, Any] = {}
        self._arguments = Arguments({}, self._form.framing)
        self._value: _Value | None = None
        self._ending: _Ending | None = None  # extended by each closing tag that follows directly
        self._earlier: _Ending | None = None  # the best one that text follows
        self._unclosed: _Ending | None = None  # text follows it, and `</tool_call>` was omitted
        self._shape = ""  # tags so far of another call, or of one in the value
        self._inner: list[bool] = []  # open calls in the value; True: with `<tool_call>`
        self._inner_closed = False
        self.nested = False
        """A value may contain a whole call."""

    def end(self, *, cut: bool) -> Reading:
        """See `CallReader.end`."""
        # The prefix of a closing tag that the token limit cut belongs to the call.
        size = self._size + len(self._tail)
        rest = size if cut and self._blank and "</".startswith(self._tail[:2]) else self._behind
        if self._tail and not cut:
            self._size = size
            reading = self._text(self._tail)
            if reading is not None:
                return reading
        ending = self._last_ending(cut)
        if ending is not None:
            return self._whole(rest if ending.end == self._behind else ending.end, ending)
        if not cut and self.nested and self._nesting:
            reader = TagReader(
                self._form_name,
                self._tools,
                nesting=False,
                ends_before_text=False,
                thought=self._thought,
            )
            reading = reader.feed(self.text) or reader.end(cut=False)
            if reading.calls:
                return self._reading(reading.size, reading.calls)
            if not self._told:
                return reading
        bare = not self.text.startswith(TOOL_START)
        if not self._told and (not cut or self._thought or bare):
            return Reading(size)
        if not self._name:
            return Reading(size, begun=True)
        stop = self._size if self._ending is None else self._ending.value
        text = None if self._value is None else self.text[self._value.start : stop]
        return self._reading(
            size, (ParsedCall(self._name, self._arguments.unfinished(text), whole=False),)
        )

    def _last_ending(self, cut: bool) -> _Ending | None:
        """Return the call's ending at the end of the text; None: it has none."""
        best = self._best(self._ending)
        if cut or self._inner:
            return best if best is not None and best.regular else None
        if best is None and self._ending is not None and self._has_required(self._ending):
            return self._ending
        return best or self._unclosed

    @property
    def _marks(self) -> str:
        return self._form.marks_in.get(self._state, self._form.marks)

    def _text(self, plain: str) -> Reading | None:
        if self._blank:
            self._next_line |= "\n" in plain[: len(plain) - len(plain.lstrip())]
        line = plain.rstrip(" \t")
        self._fresh_line = line.endswith("\n") if line else self._fresh_line
        if self._value is not None and self._value.inline is None:
            self._value.inline = plain[0] not in "\r\n"
        if self._blank and not plain.isspace():
            self._blank = False
            reading = self._text_follows()
            if reading is not None:
                return reading
        self._grow(plain)
        return None

    def _grow(self, text: str) -> None:
        """Add text to the open value, and tell what is certain of it."""
        if not self._streamed or self._value is None or self.nested:
            return
        self._arguments.grow(text)
        doubts = self._blank or self._ending or self._earlier or self._unclosed
        if not (doubts or self._value.parts):
            text = self._arguments.certain()
            if text:
                self._tell(0, self._name, text)

    def _text_follows(self) -> Reading | None:
        """Decide on the current ending, since text follows it."""
        ending, self._ending = self._ending, None
        if self._value is None:
            if ending is not None and self._next_line:
                return self._whole(ending.end, ending)
            return Reading(self._behind or 1)
        self._state = "raw" if self._value.raw else "value"
        if ending is None:
            return None
        if ending.state == "done":
            if self._ends_before_text:
                self._earlier = self._best(ending)
        elif ending.state == "ended":
            if ending.regular and self._next_line:
                self._unclosed = self._unclosed or ending
        elif self._value.parts:
            self._value.parts.pop()  # both tags belong to the value
        return None

    def _mark(self, mark: Mark) -> Reading | None:
        shape, self._shape = self._shape, self._shape_with(mark)
        fresh, self._fresh_line = self._fresh_line, False
        blank, self._blank = self._blank, True
        if self._value is not None:
            self._value.inline = self._value.inline is not False
            opens = (
                shape.endswith("call") and blank and fresh and mark.kind in ("value", "end_call")
            )
            if self._inner or (opens and self._nesting):
                self._size = self._behind = mark.end
                self._mark_inner(mark, shape if opens else "", blank)
                return None
            if shape == "block" and not (blank and mark.kind == "call"):
                self._text_follows()
        elif self._ending is not None and mark.kind in ("value", "end_value", "end_call"):
            return Reading(self._behind)  # no value is open that the tag could end or follow
        elif self._ending is not None and mark.kind != "end_block":
            return self._whole(self._ending.end, self._ending)
        self._next_line = False
        self._second, self._fresh = shape == "block" and blank, fresh
        self._grow(mark.text)
        reading = self._step(mark)
        self._behind = mark.end
        return reading

    def _step(self, mark: Mark) -> Reading | None:
        """Do what the form says of a mark in this state."""
        step = self._form.steps[self._state].get(mark.kind)
        if step is None:
            return self._no_step(mark)
        self._state, action, *told = step
        reading: Reading | None = getattr(self, f"_{action}")(mark, *told)
        return reading

    def _shape_with(self, mark: Mark) -> str:
        if mark.kind == "call":
            return "block call" if self._shape == "block" and self._blank else "call"
        return "block" if mark.kind == "block" else ""

    def _mark_inner(self, mark: Mark, opening: str, blank: bool) -> None:
        """Read a tag of a quoted call inside the value."""
        self._ending = None
        self._state = "value"
        if opening:
            self.nested = True
            self._inner.append(opening.startswith("block"))
        closed, self._inner_closed = self._inner_closed and blank, False
        if mark.kind == "end_call":
            if self._inner[-1]:
                self._inner_closed = True
            else:
                self._inner.pop()
        elif mark.kind == "end_block" and closed:
            self._inner.pop()

    def _no_step(self, mark: Mark) -> Reading | None:
        if self._value is None:
            return Reading(self._behind)
        if mark.kind == "end_thought":
            best = self._best(self._ending)
            return Reading(mark.start) if best is None else self._whole(best.end, best)
        self._ending = None if self._state == "closed" else self._ending
        return self._text_follows()

    def _go_on(self, mark: Mark) -> None:
        """Only change the state."""

    def _begin_call(self, mark: Mark) -> Reading | None:
        if mark.name not in self._tools:
            return Reading(mark.end)
        self._name, self._schema = mark.name, self._tools[mark.name]
        self._arguments = Arguments(self._schema, self._form.framing, enforced=self._enforced)
        return None

    def _begin_value(self, mark: Mark) -> None:
        self._value = _Value(mark.name, mark.end)
        self._arguments.begin(mark.name)

    def _begin_raw(self, mark: Mark) -> None:
        assert self._value is not None
        if self.text[self._value.start : mark.start].strip():
            self._state = "value"
            return
        self._value.raw = True
        self._arguments.begin_raw()

    def _end_without_values(self, mark: Mark) -> Reading | None:
        if self._schema.get("required"):
            return Reading(self._behind)
        return self._extend(mark, True)

    def _extend(self, mark: Mark, regular: bool) -> Reading | None:
        """Extend the ending by a closing tag; it is not regular if another one is missing."""
        ending = self._ending or _Ending(0, 0, True, "")
        regular = regular and ending.regular
        self._ending = replace(ending, end=mark.end, regular=regular, state=self._state)
        if self._value is None and self._state == "done":
            return self._whole(mark.end, self._ending)
        return None

    def _close(self, mark: Mark, regular: bool) -> None:
        """End the value at a closing tag; see `_extend`."""
        if self._ending is not None and self._ending.state == "done":
            self._earlier = self._best(self._ending)
        self._ending = _Ending(mark.start, mark.end, regular, self._state)

    def _next_block(self, mark: Mark) -> None:
        """Read a block's start: another call, or text if no call follows."""
        if self._state == "value":
            self._text_follows()

    def _next_call(self, mark: Mark) -> Reading | None:
        """Read the start of another call."""
        ending, self._ending = self._ending, None
        known = mark.name in self._tools
        if known and (self._second or self._fresh) and not (ending or self._earlier):
            return self._whole_or_none(self._unclosed)
        ended = ending is not None and ending.state != "closed"
        if self._second:
            self._earlier = best = self._best(ending)
            return self._whole_or_none(best if best and (known or best.regular) else None)
        if ending is not None and ended and (known or ending.regular):
            self._earlier = self._best(ending)
            return self._whole_or_none(self._earlier if known else None)
        return None

    def _next_value(self, mark: Mark) -> None:
        """Read the start of another parameter, or of text in the value."""
        assert self._value is not None
        ending, self._ending = self._ending, None
        if ending is not None and ending.state == "done" and ending.regular:
            self._earlier = self._best(ending)
        value, properties = self._value, self._schema.get("properties")
        known = isinstance(properties, Mapping) and mark.name in properties
        if ending is not None and ending.state == "closed":
            if known or self._enforced or not self._has_closed_schema():
                if any(mark.name == part.name for part in value.parts):
                    value.parts.clear()
                self._arguments.give(self._divided(ending.value))
                self._begin_value(mark)
                self._earlier = self._unclosed = None
        elif known and (self._fresh or value.inline):
            taken = self._arguments.names | {value.name, *(part.name for part in value.parts)}
            if mark.name not in taken:
                value.parts.append(mark)

    def _has_closed_schema(self) -> bool:
        closed = self._schema.get("additionalProperties") is False
        return closed and not self._schema.get("patternProperties")

    def _has_required(self, ending: _Ending) -> bool:
        """Return True if the call has all required parameters when it ends there."""
        required = self._schema.get("required")
        names = self._arguments.names | {name for name, _ in self._divided(ending.value)}
        return not isinstance(required, list) or names.issuperset(required)

    def _best(self, ending: _Ending | None) -> _Ending | None:
        """Return the better of an ending and the earlier one, if a call may end there."""
        if ending is None or ending.state == "closed":
            return self._earlier
        if self._earlier is not None and not ending.regular:
            return self._earlier
        return ending

    def _divided(self, end: int) -> list[Given]:
        """Return the open value, split at parameters with an omitted closing tag."""
        if self._value is None:
            return []
        parts = [part for part in self._value.parts if part.end <= end]
        names = [self._value.name, *(part.name for part in parts)]
        starts = [self._value.start, *(part.end for part in parts)]
        ends = [*(part.start for part in parts), end]
        text = self.text
        return [
            (name, text[start:stop]) for name, start, stop in zip(names, starts, ends, strict=True)
        ]

    def _whole(self, size: int, ending: _Ending) -> Reading:
        """Return the result for a complete call."""
        arguments = self._arguments.complete(self._divided(ending.value))
        return self._reading(size, (ParsedCall(self._name, arguments),))

    def _whole_or_none(self, ending: _Ending | None) -> Reading | None:
        return None if ending is None else self._whole(ending.end, ending)


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
