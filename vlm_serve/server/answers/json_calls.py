"""Actions for tool calls in JSON.

<tool_call>
{"name": "name", "arguments": {"key": value}}
</tool_call>

Reading is lenient where the meaning is clear: raw line breaks in strings, `parameters` instead of
`arguments`, several objects or a list of them in one block, extra or missing closing brackets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from vlm_serve.preprocess.reading.values import begins_json
from vlm_serve.server.answers.call_reader import BLOCK_MARKS, HELD, CallReader, Mark
from vlm_serve.server.answers.pieces import TOOL_START, ParsedCall, Reading, Tools
from vlm_serve.server.answers.tool_values import as_json, strict_json

_OUTSIDE = BLOCK_MARKS + r'|(?P<sign>[{}\[\]),"])'
_IN_STRING = r'(?P<sign>"|\\[\s\S])'
_NOT_JSON = re.compile(r"[^\s\d:,.+\-eEtrufalsn]")
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
_ESCAPES = {code: json.dumps(chr(code))[1:-1] for code in range(32)}
_ARGUMENTS = ("arguments", "parameters")
_DECODER = json.JSONDecoder(strict=False)
_OPEN = object()
"""The value of an open string."""


class JsonReader(CallReader):
    """Reads one block.

    While JSON arrives, only strings and brackets are tracked. Each value is parsed when its
    brackets are closed, and up to a string in its arguments that becomes long.
    """

    def __init__(self, tools: Tools, **options: bool) -> None:
        super().__init__(tools, **options)
        self._value: list[str] = []  # the open value so far
        self._value_size = self._depth = 0
        self._name = ""  # of the open call, once it has been told
        self._in_string = False
        self._string_start = 0
        self._string: str | None = None  # text of the open string to tell; None: it is not told
        self._string_tried = False
        self._calls: list[ParsedCall] = []
        self._behind_calls = 0

    def end(self, *, cut: bool) -> Reading:
        """See `CallReader.end`."""
        size = self._size + len(self._tail)
        if not self._depth:
            if self._calls:
                return self._reading(size if cut else self._size, self._calls)
            return Reading(size, begun=cut and not self._thought)
        if not cut:
            reading = self._close_missing()
            return reading or self._reading(self._size, self._calls)
        outcome = None if self._thought else unfinished("".join(self._value), self._tools)
        if not isinstance(outcome, ParsedCall) and len(self._told) > len(self._calls):
            outcome = self._told_call()
        if isinstance(outcome, ParsedCall):
            return self._reading(size, (*self._calls, outcome))
        if self._calls:
            return self._reading(size if outcome == "begun" else self._behind_calls, self._calls)
        return Reading(size, begun=outcome == "begun")

    @property
    def _marks(self) -> str:
        return _IN_STRING if self._in_string else _OUTSIDE

    def _text(self, plain: str) -> Reading | None:
        if self._in_string:
            self._keep(plain)
            self._grow(plain)
        elif self._depth:
            self._keep(plain)
            wrong = _NOT_JSON.search(plain)
            if wrong is not None:
                self._size -= len(plain) - wrong.start()
                return self._refuse()
        elif not plain.isspace():
            return self._refuse()
        return None

    def _mark(self, mark: Mark) -> Reading | None:
        if mark.kind == "end_thought":
            return self._reading(mark.start, [] if self._depth else self._calls)
        if self._depth and mark.kind != "sign":
            return self._close_early(mark)
        if not self._depth:
            return self._between(mark)
        self._keep(mark.text)
        if self._in_string:
            self._go_on(mark.text)
        elif mark.text == '"':
            self._in_string, self._string_start = True, self._value_size
            self._string, self._string_tried = None, not self._streamed or self._depth != 2
        elif mark.text in "{[":
            self._depth += 1
        elif mark.text in "}]":
            self._depth -= 1
            return None if self._depth else self._parse("".join(self._value))
        return self._refuse() if mark.text == ")" else None

    def _between(self, mark: Mark) -> Reading | None:
        """Read a mark outside of values."""
        if not mark.start or mark.text == "[":  # the block's start, or that of a list of calls
            return None
        if mark.text == "{":
            if self._single and self._calls:
                return self._reading(self._behind_calls, self._calls)
            self._value, self._value_size, self._depth, self._string_start = [], 0, 1, 0
            self._keep(mark.text)
            return None
        if not self._calls or mark.text == '"':
            return self._refuse()
        if mark.kind == "sign":
            return None
        return self._reading(mark.start if mark.kind == "block" else mark.end, self._calls)

    def _refuse(self) -> Reading:
        """Return the result for a block that cannot be read: text, but for what has been told."""
        if not self._told:
            return Reading(len(TOOL_START))
        if len(self._told) > len(self._calls):
            return Reading(self._size, (*self._calls, self._told_call()))
        return self._reading(self._behind_calls, self._calls)

    def _told_call(self) -> ParsedCall:
        return ParsedCall(self._name, self.told(len(self._calls)) or "", whole=False)

    def _keep(self, text: str) -> None:
        """Add characters to the open value."""
        self._value.append(text)
        self._value_size += len(text)

    def _parse(self, text: str) -> Reading | None:
        """Parse a finished value; return the result if it is no call."""
        self._depth = 0
        try:
            value = strict_json(text, lenient=True, bounded=self._enforced)
            self._calls.append(call_of(value, self._tools))
        except (ValueError, RecursionError):
            return self._refuse()
        self._behind_calls = self._size
        return None

    def _close_early(self, mark: Mark) -> Reading | None:
        """Read the block's end, or another one's start, inside an object."""
        self._size = mark.start
        reading = self._close_missing()
        if reading is not None:
            return reading
        self._size = mark.end
        return self._between(mark)

    def _close_missing(self) -> Reading | None:
        """Parse an object without its last bracket; return the result if that is no call."""
        text = "".join(self._value)
        if self._depth != 1 or self._in_string or not text.rstrip().endswith("}"):
            return self._refuse()
        return self._parse(text + "}")

    def _go_on(self, sign: str) -> None:
        """Read an escape or the end of the open string."""
        if sign != '"':
            self._grow(sign)
            return
        self._in_string = False
        if self._string is not None and DECODABLE.fullmatch(self._string):
            rest = json.loads(f'"{self._string}"', strict=False)
            self._tell(len(self._calls), self._name, as_json(rest)[1:])

    def _grow(self, text: str) -> None:
        """Add text to the open string, and tell it if it is long."""
        if self._string is not None:
            self._string += text
        elif self._string_tried or self._value_size - self._string_start < HELD:
            return
        else:
            # Parse a long value only as often as its strings are long.
            start = self._string_start
            if self._value_size - start < start // 16:
                return
            self._string_tried = True
            value = "".join(self._value)
            begun = self._arguments_before(value[: start - 1])
            if begun is None:
                return
            self._tell(len(self._calls), self._name, begun)
            self._string = value[start:]
        self._tell_string()

    def _arguments_before(self, text: str) -> str | None:
        """Return the arguments before a string, less what has been told; None: it is no argument.

        Args:
            text: the open value before the string.
        """
        try:
            value = strict_json(text + "NaN}}", lenient=True, constant=lambda _: _OPEN)
            arguments = value[next(reversed(value))]
            name = next(reversed(arguments))
            if next(reversed(value)) not in _ARGUMENTS or arguments[name] is not _OPEN:
                return None
            arguments[name] = ""
            call = call_of(value, self._tools)
        except (ValueError, RecursionError, TypeError, KeyError, StopIteration):
            return None
        for number, earlier in enumerate(self._calls):
            if number >= len(self._told):
                self._tell(number, earlier.name, earlier.arguments)
        self._name = call.name
        told = self.told(len(self._calls)) or ""
        begun = call.arguments[:-2]
        return begun[len(told) :] if begun.startswith(told) else None

    def _tell_string(self) -> None:
        assert self._string is not None
        text, size = decodable(self._string)
        self._string = self._string[size:]
        if text:
            self._tell(len(self._calls), self._name, as_json(text)[1:-1])


def call_of(value: Any, tools: Tools) -> ParsedCall:
    """Return the call that a JSON value is.

    Raises:
        ValueError: the value is ambiguous or no call.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in tools:
        raise ValueError("no tool")
    given = [value[key] for key in _ARGUMENTS if value.get(key)]
    if len(given) > 1:
        raise ValueError("arguments twice")
    arguments = _unpacked(given[0]) if given else {}
    properties = tools[name].get("properties")
    strayed = {*value} - {"name", "type", "id", *_ARGUMENTS, *arguments}
    if isinstance(properties, Mapping) and strayed & {*properties}:
        raise ValueError("an argument beside the arguments")
    return ParsedCall(name, as_json(arguments))


def _unpacked(value: Any) -> dict[str, Any]:
    """Return the arguments as an object; some models write them as a string of JSON."""
    if isinstance(value, str):
        value = strict_json(value, lenient=True) if value.strip() else {}
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def unfinished(text: str, tools: Tools) -> ParsedCall | str:
    """Return the call at the start of an incomplete JSON object.

    Return "begun" if its name is still missing, and "" if it is no call.
    """
    try:
        members, last, value = _members(text)
        name = members.get("name")
        if name is None:
            return "begun" if not {last, *members} & {*_ARGUMENTS} else ""
        if name in tools and any(members.get(key) for key in _ARGUMENTS):
            return call_of(members, tools)
        if name not in tools:
            return ""
        written = _TEXT.sub(lambda match: match.group().translate(_ESCAPES), value)
        if last not in _ARGUMENTS or not written.startswith("{"):
            return ParsedCall(name, "{", whole=False)
        return ParsedCall(name, written.rstrip(), whole=False) if begins_json(written) else ""
    except (ValueError, RecursionError, TypeError):
        return ""


def _members(text: str) -> tuple[dict[str, Any], str, str]:
    """Return the whole members of an incomplete object, and the key and text of its last value."""
    members: dict[str, Any] = {}
    last, value, at = "", "", len("{")
    with suppress(ValueError):
        while at < len(text):
            key, at = _DECODER.raw_decode(text, _past(text, at, ","))
            start = _past(text, at, ":")
            last, value = str(key), text[start:]
            member, at = _DECODER.raw_decode(text, start)
            value = text[start:at]
            members.setdefault(last, member)
    return members, last, value


def _past(text: str, at: int, sign: str) -> int:
    """Return the position after white space and a sign."""
    while at < len(text) and (text[at].isspace() or text[at] == sign):
        at += 1
    return at


DECODABLE = re.compile(r'(?:[^"\\]+|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
"""The content of a string up to its end or to an escape that is not complete."""
_HIGH_SURROGATE = re.compile("[\ud800-\udbff]$")


def decodable(text: str) -> tuple[str, int]:
    """Return what the start of a string's content stands for, and its length.

    An escape that is not complete, and what follows a quotation mark, is left.
    """
    match = DECODABLE.match(text)
    assert match is not None
    content, size = json.loads(f'"{match.group()}"', strict=False), match.end()
    if _HIGH_SURROGATE.search(content) and text[:size][-6:].startswith("\\u"):
        content, size = content[:-1], size - 6  # its other half may follow
    return content, size
