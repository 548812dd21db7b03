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

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vlm_serve.server.answers.call_forms import ENFORCED, FORMS
from vlm_serve.server.answers.call_reader import CallReader, Found
from vlm_serve.server.answers.pieces import TOOL_START, Call, Reading, ToolForm, Tools
from vlm_serve.server.answers.tag_arguments import Arguments, Given


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
    parts: list[Found] = field(default_factory=list)


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
            size, (Call(self._name, self._arguments.unfinished(text), whole=False),)
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

    def _mark(self, found: Found) -> Reading | None:
        shape, self._shape = self._shape, self._shape_with(found)
        fresh, self._fresh_line = self._fresh_line, False
        blank, self._blank = self._blank, True
        if self._value is not None:
            self._value.inline = self._value.inline is not False
            opens = (
                shape.endswith("call") and blank and fresh and found.kind in ("value", "end_call")
            )
            if self._inner or (opens and self._nesting):
                self._size = self._behind = found.end
                self._mark_inner(found, shape if opens else "", blank)
                return None
            if shape == "block" and not (blank and found.kind == "call"):
                self._text_follows()
        elif self._ending is not None and found.kind in ("value", "end_value", "end_call"):
            return Reading(self._behind)  # no value is open that the tag could end or follow
        elif self._ending is not None and found.kind != "end_block":
            return self._whole(self._ending.end, self._ending)
        self._next_line = False
        self._second, self._fresh = shape == "block" and blank, fresh
        self._grow(found.text)
        reading = self._step(found)
        self._behind = found.end
        return reading

    def _step(self, found: Found) -> Reading | None:
        """Do what the form says of a mark in this state."""
        step = self._form.steps[self._state].get(found.kind)
        if step is None:
            return self._no_step(found)
        self._state, action, *told = step
        reading: Reading | None = getattr(self, f"_{action}")(found, *told)
        return reading

    def _shape_with(self, found: Found) -> str:
        if found.kind == "call":
            return "block call" if self._shape == "block" and self._blank else "call"
        return "block" if found.kind == "block" else ""

    def _mark_inner(self, found: Found, opening: str, blank: bool) -> None:
        """Read a tag of a quoted call inside the value."""
        self._ending = None
        self._state = "value"
        if opening:
            self.nested = True
            self._inner.append(opening.startswith("block"))
        closed, self._inner_closed = self._inner_closed and blank, False
        if found.kind == "end_call":
            if self._inner[-1]:
                self._inner_closed = True
            else:
                self._inner.pop()
        elif found.kind == "end_block" and closed:
            self._inner.pop()

    def _no_step(self, found: Found) -> Reading | None:
        if self._value is None:
            return Reading(self._behind)
        if found.kind == "end_thought":
            best = self._best(self._ending)
            return Reading(found.start) if best is None else self._whole(best.end, best)
        self._ending = None if self._state == "closed" else self._ending
        return self._text_follows()

    def _go_on(self, found: Found) -> None:
        """Only change the state."""

    def _begin_call(self, found: Found) -> Reading | None:
        if found.name not in self._tools:
            return Reading(found.end)
        self._name, self._schema = found.name, self._tools[found.name]
        self._arguments = Arguments(self._schema, self._form.framing, enforced=self._enforced)
        return None

    def _begin_value(self, found: Found) -> None:
        self._value = _Value(found.name, found.end)
        self._arguments.begin(found.name)

    def _begin_raw(self, found: Found) -> None:
        assert self._value is not None
        if self.text[self._value.start : found.start].strip():
            self._state = "value"
            return
        self._value.raw = True
        self._arguments.begin_raw()

    def _end_without_values(self, found: Found) -> Reading | None:
        if self._schema.get("required"):
            return Reading(self._behind)
        return self._extend(found, True)

    def _extend(self, found: Found, regular: bool) -> Reading | None:
        """Extend the ending by a closing tag; it is not regular if another one is missing."""
        ending = self._ending or _Ending(0, 0, True, "")
        regular = regular and ending.regular
        self._ending = replace(ending, end=found.end, regular=regular, state=self._state)
        if self._value is None and self._state == "done":
            return self._whole(found.end, self._ending)
        return None

    def _close(self, found: Found, regular: bool) -> None:
        """End the value at a closing tag; see `_extend`."""
        if self._ending is not None and self._ending.state == "done":
            self._earlier = self._best(self._ending)
        self._ending = _Ending(found.start, found.end, regular, self._state)

    def _next_block(self, found: Found) -> None:
        """Read a block's start: another call, or text if no call follows."""
        if self._state == "value":
            self._text_follows()

    def _next_call(self, found: Found) -> Reading | None:
        """Read the start of another call."""
        ending, self._ending = self._ending, None
        known = found.name in self._tools
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

    def _next_value(self, found: Found) -> None:
        """Read the start of another parameter, or of text in the value."""
        assert self._value is not None
        ending, self._ending = self._ending, None
        if ending is not None and ending.state == "done" and ending.regular:
            self._earlier = self._best(ending)
        value, properties = self._value, self._schema.get("properties")
        known = isinstance(properties, Mapping) and found.name in properties
        if ending is not None and ending.state == "closed":
            if known or self._enforced or not self._has_closed_schema():
                if any(found.name == part.name for part in value.parts):
                    value.parts.clear()
                self._arguments.give(self._divided(ending.value))
                self._begin_value(found)
                self._earlier = self._unclosed = None
        elif known and (self._fresh or value.inline):
            taken = self._arguments.names | {value.name, *(part.name for part in value.parts)}
            if found.name not in taken:
                value.parts.append(found)

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
        return self._reading(size, (Call(self._name, arguments),))

    def _whole_or_none(self, ending: _Ending | None) -> Reading | None:
        return None if ending is None else self._whole(ending.end, ending)
