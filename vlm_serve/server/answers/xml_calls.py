"""Tool calls as Qwen3.5 writes them.

<tool_call>
<function=name>
<parameter=key>
value
</parameter>
</function>
</tool_call>

Values are not escaped, so a tag in one may belong to the form or to the value. `xml_values` decides
that; this module reads the structure around the values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vlm_serve.server.answers.pieces import TOOL_END, TOOL_START, Call, Reading, Tools
from vlm_serve.server.answers.xml_values import Ending, Tag, ValueReader, complete, unfinished

_TAG = re.compile(
    r"<(?:(/?tool_call|/function|/parameter|/think)|(function|parameter)=([^<>\n]{1,256}))>"
)
_FIXED = ("<tool_call>", "</tool_call>", "</function>", "</parameter>", "</think>")
_NAMED = re.compile(r"<(?:function|parameter)=[^<>\n]{0,256}")
_LONGEST = len("<parameter=>") + 256


class XmlCalls:
    """The `CallForm` of tags, for one answer.

    Attributes:
        retries: number of calls that may still be read twice, which bounds the time of an answer.
    """

    openings: tuple[str, ...] = (TOOL_START, "<function=")

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.retries = 8

    def reader(self, *, thought: bool) -> XmlReader:
        """See `CallForm.reader`."""
        return XmlReader(self, thought=thought)


class XmlReader:
    """A `CallReader` of one call, tag by tag."""

    def __init__(self, form: XmlCalls, *, thought: bool, again: bool = False) -> None:
        self._form = form
        self._again = again
        self._thought = thought
        self._parts: list[str] = []
        self._size = 0  # number of characters read
        self._tail = ""  # unread end, which may become a tag
        self._blank = True  # only white space since the last tag
        self._next_line = False  # a line break in that white space
        self._fresh_line = False
        self._behind = 0  # end of the last tag
        self._state = "start"
        self._bare = False
        self._name = ""
        self._schema: Mapping[str, Any] = {}
        self._values: ValueReader | None = None

    @property
    def text(self) -> str:
        """See `CallReader.text`."""
        return "".join(self._parts)

    def feed(self, text: str) -> Reading | None:
        """See `CallReader.feed`."""
        self._parts.append(text)
        text, at = self._tail + text, 0
        while True:
            start = text.find("<", at)
            plain = text[at:] if start < 0 else text[at:start]
            reading = self._pass(plain)
            if reading is not None:
                return reading
            if start < 0:
                self._tail = ""
                return None
            found = _TAG.match(text, start)
            if found is None and _may_become_tag(text, start):
                self._tail = text[start:]
                return None
            at = found.end() if found is not None else start + 1
            known = found is not None and (self._thought or found.group(1) != "/think")
            reading = (
                self._take(found) if found is not None and known else self._pass(text[start:at])
            )
            if reading is not None:
                return reading

    def end(self, *, cut: bool) -> Reading:
        """See `CallReader.end`."""
        if not cut and self._tail:
            self._blank = False
        size = self._size + len(self._tail)
        # The prefix of a closing tag that the token limit cut belongs to the call.
        rest = size if cut and self._blank and TOOL_END.startswith(self._tail) else self._behind
        if self._state == "empty" and self._blank:
            return self._whole(rest)
        if self._values is not None:
            ending = self._values.end(self._blank, self._next_line, cut=cut)
            if ending is not None:
                return self._whole(rest if ending.end == self._behind else ending.end, ending)
            if not cut and self._values.nested and not self._again:
                return self._read_again()
        if not cut or self._thought or self._bare or self._state == "empty":
            return Reading(size)
        if not self._name:
            return Reading(size, begun=True)
        given = self._values.unfinished(self._size) if self._values is not None else []
        return Reading(size, (Call(self._name, unfinished(self.text, given, self._schema)),))

    def _read_again(self) -> Reading:
        """Read the text again, without whole calls inside values."""
        self._form.retries -= 1
        reader = XmlReader(self._form, thought=self._thought, again=True)
        return reader.feed(self.text) or reader.end(cut=False)

    def _pass(self, plain: str) -> Reading | None:
        """Read text between tags."""
        if not plain:
            return None
        self._size += len(plain)
        if self._blank:
            self._next_line |= "\n" in plain[: len(plain) - len(plain.lstrip())]
        self._blank = self._blank and plain.isspace()
        if self._values is not None:
            self._values.skip(plain)
        line = plain.rstrip(" \t")
        self._fresh_line = line.endswith("\n") if line else self._fresh_line
        if not self._blank and self._values is None:
            called = self._state == "empty" and self._next_line
            return self._whole(self._behind) if called else Reading(self._behind or 1)
        return None

    def _take(self, found: re.Match[str]) -> Reading | None:
        """Read a tag; return the result if it is certain."""
        kind = found.group(1) or found.group(2)
        name = (found.group(3) or "").strip().strip("\"'")
        end = self._size + len(found.group())
        tag = Tag(kind, name, self._size, end, self._blank, self._next_line)
        fresh, before = self._fresh_line, self._behind
        self._size = self._behind = tag.end
        self._blank, self._next_line, self._fresh_line = True, False, False
        if self._values is not None:
            return self._in_values(tag, fresh)
        if kind == "tool_call" and self._state == "start":
            self._state = "opened"
        elif kind == "function" and self._state in ("start", "opened"):
            self._bare = self._state == "start"
            if name not in self._form.tools:
                return Reading(tag.end)
            self._name, self._schema, self._state = name, self._form.tools[name], "named"
        elif kind == "parameter" and self._state == "named":
            self._values = ValueReader(
                self._schema,
                self._form.tools,
                tag,
                nesting=self._form.retries > 0 and not self._again,
                ends_before_text=not self._again,
            )
        elif kind == "/function" and self._state == "named":
            self._state = "empty"
        elif kind == "/tool_call" and self._state == "named" and not self._schema.get("required"):
            return self._whole(tag.end)
        elif self._state == "empty" and kind in ("/tool_call", "tool_call", "function", "/think"):
            return self._whole(tag.end if kind == "/tool_call" else before)
        else:
            return Reading(before)
        return None

    def _in_values(self, tag: Tag, fresh_line: bool) -> Reading | None:
        """Read a tag after the first value has begun."""
        assert self._values is not None
        ending = self._values.take(tag, fresh_line)
        if ending is not None:
            return self._whole(ending.end, ending)
        return Reading(tag.start) if tag.kind == "/think" else None

    def _whole(self, size: int, ending: Ending | None = None) -> Reading:
        """Return the result for a complete call."""
        given = self._values.values(ending) if self._values and ending else []
        return Reading(size, (Call(self._name, complete(self.text, given, self._schema)),))


def _may_become_tag(text: str, start: int) -> bool:
    """Return True if the text from `start` on is a prefix of a tag."""
    if len(text) - start > _LONGEST:
        return False
    rest = text[start:]
    return any(each.startswith(rest) for each in (*_FIXED, "<function=", "<parameter=")) or bool(
        _NAMED.fullmatch(rest)
    )
