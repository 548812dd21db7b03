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
        untold: its text that has not been told, unless it is known to be none.
        size: length of its text while that is undecided.
        is_text: it is text for certain; None: undecided.
    """

    name: str
    start: int
    raw: bool = False
    inline: bool | None = None
    parts: list[Mark] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    size: int = 0
    is_text: bool | None = None

    def grow(self, text: str) -> None:
        """Add text. It may still turn out not to belong to the value."""
        if self.is_text is not False:
            self.untold.append(text)
            self.size += len(text)


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
        # kinds of the last two tags, as far as no text follows them; "" is the start
        self._last: tuple[str, ...] = ("",)
        self._next_line = False  # a line break in the white space since the last tag
        self._fresh_line = False  # the next tag is the first one of its line
        self._fresh = False  # the last one was
        self._behind = 0  # end of the last tag
        self._name = ""
        self._arguments = Arguments({}, self._form.framing)
        self._value: _Value | None = None
        self._ending: _Ending | None = None  # extended by each closing tag that follows directly
        self._earlier: _Ending | None = None  # the best one that text follows
        self._unclosed: _Ending | None = None  # text follows it, and `</tool_call>` was omitted
        self._inner: list[bool] = []  # open calls in the value; True: with `<tool_call>`
        self._inner_closed = False

    def end(self, *, cut: bool) -> Reading:
        """See `CallReader.end`."""
        # The prefix of a closing tag that the token limit cut belongs to the call.
        size = self._size + len(self._tail)
        rest = size if cut and self._last and "</".startswith(self._tail[:2]) else self._behind
        if self._tail and not cut:
            self._size = size
            reading = self._text(self._tail)
            if reading is not None:
                return reading
        ending = self._last_ending(cut)
        if ending is not None:
            return self._whole(ending, rest if ending.end == self._behind else ending.end)
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
        arguments = self._arguments.unfinished(self._value, self.text[:stop])
        return self._reading(size, (ParsedCall(self._name, arguments, whole=False),))

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
        if self._last:
            self._next_line |= "\n" in plain[: len(plain) - len(plain.lstrip())]
        line = plain.rstrip(" \t")
        self._fresh_line = line.endswith("\n") if line else self._fresh_line
        if self._value is not None and self._value.inline is None:
            self._value.inline = plain[0] not in "\r\n"
        if self._last and not plain.isspace():
            self._last = ()
            reading = self._text_follows()
            if reading is not None:
                return reading
        self._grow(plain)
        return None

    def _grow(self, text: str) -> None:
        """Add text to the open value, and tell what is certain of it."""
        if not self._streamed or self._value is None or self.nested:
            return
        self._value.grow(text)
        doubts = self._last or self._ending or self._earlier or self._unclosed
        if not (doubts or self._value.parts):
            text = self._arguments.certain(self._value)
            if text:
                self._tell(0, self._name, text)

    def _text_follows(self) -> Reading | None:
        """Decide on the current ending, since text follows it."""
        ending, self._ending = self._ending, None
        if self._value is None:
            if ending is not None and self._next_line:
                return self._whole(ending)
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
        last, self._last = self._last, (*self._last[-1:], mark.kind)
        self._fresh, self._fresh_line = self._fresh_line, False
        if self._value is not None:
            self._value.inline = self._value.inline is not False
            opens = last[-1:] == ("call",) and self._fresh and mark.kind in ("value", "end_call")
            if self._inner or (opens and self._nesting):
                self._size = self._behind = mark.end
                if opens:
                    self.nested = True
                    self._inner.append(last[0] == "block")
                self._mark_inner(mark.kind, blank=bool(last))
                return None
            if last[-1:] == ("block",) and mark.kind != "call":
                self._text_follows()
        elif self._ending is not None and mark.kind in ("value", "end_value", "end_call"):
            return Reading(self._behind)  # no value is open that the tag could end or follow
        elif self._ending is not None and mark.kind != "end_block":
            return self._whole(self._ending)
        self._next_line = False
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

    def _mark_inner(self, kind: str, *, blank: bool) -> None:
        """Read a tag of a quoted call inside the value."""
        self._ending = None
        self._state = "value"
        closed, self._inner_closed = self._inner_closed and blank, False
        if kind == "end_call" and self._inner[-1]:
            self._inner_closed = True
        elif kind == "end_call" or (kind == "end_block" and closed):
            self._inner.pop()

    def _no_step(self, mark: Mark) -> Reading | None:
        if self._value is None:
            return Reading(self._behind)
        if mark.kind == "end_thought":
            best = self._best(self._ending)
            return self._whole_or_none(best) or Reading(mark.start)
        self._ending = None if self._state == "closed" else self._ending
        return self._text_follows()

    def _go_on(self, mark: Mark) -> None:
        """Only change the state."""

    def _begin_call(self, mark: Mark) -> Reading | None:
        if mark.name not in self._tools:
            return Reading(mark.end)
        self._name, schema = mark.name, self._tools[mark.name]
        self._arguments = Arguments(schema, self._form.framing, enforced=self._enforced)
        return None

    def _begin_value(self, mark: Mark) -> None:
        self._value = _Value(mark.name, mark.end)

    def _begin_raw(self, mark: Mark) -> None:
        assert self._value is not None
        if self.text[self._value.start : mark.start].strip():
            self._state = "value"
            return
        self._value.raw, self._value.untold, self._value.size = True, [], 0

    def _end_without_values(self, mark: Mark) -> Reading | None:
        if self._arguments.schema.get("required"):
            return Reading(self._behind)
        return self._extend(mark, True)

    def _extend(self, mark: Mark, regular: bool) -> Reading | None:
        """Extend the ending by a closing tag; it is not regular if another one is missing."""
        ending = self._ending or _Ending(0, 0, True, "")
        regular = regular and ending.regular
        self._ending = replace(ending, end=mark.end, regular=regular, state=self._state)
        if self._value is None and self._state == "done":
            return self._whole(self._ending)
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
        known, second = mark.name in self._tools, self._last[0] == "block"
        if known and (second or self._fresh) and not (ending or self._earlier):
            return self._whole_or_none(self._unclosed)
        ended = ending is not None and ending.state != "closed"
        if second:
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
        value, known = self._value, self._arguments.names_property(mark.name)
        if ending is not None and ending.state == "closed":
            if known or self._enforced or not self._arguments.closed:
                if any(mark.name == part.name for part in value.parts):
                    value.parts.clear()
                self._arguments.give(self._divided(ending.value))
                self._begin_value(mark)
                self._earlier = self._unclosed = None
        elif known and (self._fresh or value.inline):
            taken = self._arguments.names | {value.name, *(part.name for part in value.parts)}
            if mark.name not in taken:
                value.parts.append(mark)

    def _has_required(self, ending: _Ending) -> bool:
        """Return True if the call has all required parameters when it ends there."""
        required = self._arguments.schema.get("required")
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

    def _whole(self, ending: _Ending, size: int | None = None) -> Reading:
        """Return the result for a complete call.

        Args:
            size: as in `Reading`; None: up to the ending.
        """
        arguments = self._arguments.complete(self._divided(ending.value))
        call = ParsedCall(self._name, arguments)
        return self._reading(ending.end if size is None else size, (call,))

    def _whole_or_none(self, ending: _Ending | None) -> Reading | None:
        return None if ending is None else self._whole(ending)


Given = tuple[str, str]
"""A parameter's name and the text of its value."""

_RAW = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)
_FRAMES = {
    "line": (re.compile(r"(?:\r?\n)?"), re.compile(r"\r?\n?\Z")),
    "space": (re.compile(r"\s*"), re.compile(r"\s*\Z")),
    "raw": (re.compile(""), re.compile(r"\Z")),
}
"""White space at the start and at the end of a text that may belong to the form."""


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
        self.schema, self._framing = schema, framing
        self._document = Document(schema) if enforced else None
        self._members: dict[str, str] = {}
        self._told = 0  # length of what has been told

    @property
    def names(self) -> set[str]:
        return set(self._members)

    @property
    def closed(self) -> bool:
        """True if the schema allows only the parameters that it names."""
        closed = self.schema.get("additionalProperties") is False
        return closed and not self.schema.get("patternProperties")

    def names_property(self, name: str) -> bool:
        """Return True if the schema names a parameter."""
        properties = self.schema.get("properties")
        return isinstance(properties, Mapping) and name in properties

    def give(self, given: Iterable[Given]) -> None:
        """Add values that have ended."""
        for name, text in given:
            if name not in self._members:
                self._members[name] = self._member(name, text)

    def certain(self, value: _Value) -> str:
        """Return more of the arguments: all text so far belongs to the open value."""
        if value.is_text is False or (value.is_text is None and value.size < HELD):
            return ""
        begun, text = "", "".join(value.untold)
        frame = "raw" if value.raw else self._framing
        frame_start, frame_end = _FRAMES[frame]
        if value.is_text is None:
            value.is_text = self._is_text(value.name, text, frame)
            if not value.is_text:
                return ""
            opened = "{" + ", ".join([*self._members.values(), f'{json.dumps(value.name)}: "'])
            begun, text = opened[self._told :], frame_start.sub("", text, count=1)
        end = frame_end.search(text)
        assert end is not None
        value.untold = [text[end.start() :]]
        begun += as_json(text[: end.start()])[1:-1]
        self._told += len(begun)
        return begun

    def _is_text(self, name: str, text: str, frame: str) -> bool:
        """Return True if an open value is text for certain, by its start."""
        if name in self._members:
            return False
        if self._document is not None:
            return is_enforced_text(text[1:HELD], kinds_of_parameter(self._document, name))
        start = text[:HELD] if frame == "raw" else text[:HELD].strip()
        return is_plain_text(self._property(name), self.schema, start, HELD)

    def complete(self, given: Iterable[Given]) -> str:
        """Return all arguments, with the last values."""
        self.give(given)
        return "{" + ", ".join(self._members.values()) + "}"

    def unfinished(self, value: _Value | None, text: str) -> str:
        """Return the arguments of a call that ends in its last value, as a prefix of JSON.

        Args:
            value: the open value; None: there is none.
            text: the call's text up to the value's end.
        """
        members = list(self._members.values())
        if value is not None and value.name not in self._members:
            text = text[value.start :]
            if value.raw:
                text = text.lstrip().removeprefix("<![CDATA[")
            else:
                text = text.strip() if self._framing == "space" else unframed(text)
            written = as_json(text)[:-1]
            if self._takes_no_text(value.name):
                written = text.strip() if begins_json(text) else ""
            members.append(f"{json.dumps(value.name)}: {written}")
        return "{" + ", ".join(members)

    def _takes_no_text(self, name: str) -> bool:
        if self._document is not None:
            return "string" not in kinds_of_parameter(self._document, name)
        return is_no_text(self._property(name), self.schema)

    def _member(self, name: str, text: str) -> str:
        if self._document is not None:
            kinds = kinds_of_parameter(self._document, name)
            return f"{json.dumps(name)}: {enforced_json(unframed(text), kinds)}"
        raw = _RAW.fullmatch(text) if self._framing == "space" else None
        exact = raw.group(1) if raw else text.strip() if self._framing == "space" else None
        value = read(text, self._property(name), self.schema, exact=exact)
        return f"{json.dumps(name)}: {as_json(value)}"

    def _property(self, name: str) -> Any:
        return self.schema["properties"][name] if self.names_property(name) else None
