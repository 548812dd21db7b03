"""Tool calls as Qwen3-VL, Qwen3-Next and Hermes write them.

<tool_call>
{"name": "name", "arguments": {"key": value}}
</tool_call>

Reading is lenient where the meaning is clear: raw line breaks in strings, `parameters` instead of
`arguments`, several objects or a list of them in one block, extra closing brackets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from vlm_serve.server.answers.pieces import THINK_END, TOOL_END, TOOL_START, Call, Reading, Tools
from vlm_serve.server.answers.tool_values import as_json, begins_json, strict_json

_SIGN = re.compile(r"[^\s\d:,.+\-eEtrufalsn]")
_IN_TEXT = re.compile(r'["\\]')
_SPACE = re.compile(r"\s*")
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
_ESCAPES = {code: json.dumps(chr(code))[1:-1] for code in range(32)}
_ARGUMENTS = ("arguments", "parameters")
_DECODER = json.JSONDecoder(strict=False)


class HermesCalls:
    """The `CallForm` of JSON objects, for one answer."""

    openings: tuple[str, ...] = (TOOL_START,)

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def reader(self, *, thought: bool) -> HermesReader:
        """See `CallForm.reader`."""
        return HermesReader(self._tools, thought=thought)


class HermesReader:
    """A `CallReader` of one block.

    While JSON arrives, only strings and brackets are tracked. Each value is parsed when its
    brackets are closed.
    """

    def __init__(self, tools: Tools, *, thought: bool) -> None:
        self._tools = tools
        self._thought = thought
        self._parts: list[str] = []
        self._length = 0
        self._size = 0  # number of characters read
        self._rest = ""  # unread end, which may become a tag
        self._value: list[str] = []  # the open value so far
        self._depth = 0
        self._in_text = self._escaped = False
        self._calls: list[Call] = []
        self._behind_calls = 0

    @property
    def text(self) -> str:
        """See `CallReader.text`."""
        return "".join(self._parts)

    def feed(self, text: str) -> Reading | None:
        """See `CallReader.feed`."""
        thought_end = self._thought_end(text)
        self._parts.append(text)
        self._length += len(text)
        data, at = self._rest + text, 0
        if thought_end is not None:
            data = data[: max(thought_end - self._size, 0)]
        if not self._size:
            at = self._size = len(TOOL_START)
        try:
            while at < len(data):
                step = self._in_value(data, at) if self._depth else self._between(data, at)
                if isinstance(step, Reading):
                    return step
                if step == at:
                    break
                self._size += step - at
                at = step
        except (ValueError, RecursionError):
            return Reading(len(TOOL_START))
        self._rest = data[at:]
        if thought_end is None:
            return None
        whole = not self._depth and not self._rest
        return Reading(self._size, self._calls) if whole else Reading(thought_end)

    def end(self, *, cut: bool) -> Reading:
        """See `CallReader.end`."""
        size = self._size + len(self._rest)
        if not self._depth:
            if self._calls:
                return Reading(size if cut else self._size, self._calls)
            return Reading(size, begun=cut and not self._thought)
        if not cut:
            try:
                self._close_early()
            except (ValueError, RecursionError):
                return Reading(size)
            return Reading(self._size, self._calls)
        found = None if self._thought else unfinished("".join(self._value), self._tools)
        if isinstance(found, Call):
            return Reading(size, (*self._calls, found))
        if self._calls:
            return Reading(size if found == "begun" else self._behind_calls, self._calls)
        return Reading(size, begun=found == "begun")

    def _thought_end(self, text: str) -> int | None:
        """Return where the block's thought ends; None: this text does not end it."""
        if not self._thought:
            return None
        before = "".join(self._parts[-len(THINK_END) :])[1 - len(THINK_END) :]
        at = (before + text).find(THINK_END)
        return None if at < 0 else self._length - len(before) + at

    def _between(self, data: str, at: int) -> Reading | int:
        """Read text between values; return the position after it, or the result."""
        space = _SPACE.match(data, at)
        if space is not None and space.end() > at:
            return space.end()
        if data[at] in "{[":
            self._depth, self._value = 1, [data[at]]
            return at + 1
        if not self._calls:
            raise ValueError("no JSON")
        if data[at] in "}]),":
            return at + 1
        rest = data[at : at + len(TOOL_END)]
        if rest.startswith(TOOL_END):
            return Reading(self._size + len(TOOL_END), self._calls)
        if rest.startswith(TOOL_START):
            return Reading(self._size, self._calls)
        if any(each.startswith(rest) for each in (TOOL_START, TOOL_END, THINK_END)):
            return at
        raise ValueError("text behind the JSON")

    def _in_value(self, data: str, at: int) -> Reading | int:
        """Read a value up to the next significant character."""
        if self._escaped:
            self._escaped = False
            return self._keep(data, at, at + 1)
        found = (_IN_TEXT if self._in_text else _SIGN).search(data, at)
        if found is None:
            return self._keep(data, at, len(data))
        sign = found.group()
        if sign == "<":
            return self._tag(data, at, found.start())
        self._keep(data, at, found.end())
        if sign == "\\" and self._in_text:
            self._escaped = True
        elif sign == '"':
            self._in_text = not self._in_text
        elif sign in "{[":
            self._depth += 1
        elif sign in "}]":
            self._depth -= 1
            if not self._depth:
                self._close("".join(self._value))
                self._behind_calls = self._size + found.end() - at
        else:
            raise ValueError("no JSON")
        return found.end()

    def _keep(self, data: str, at: int, end: int) -> int:
        """Add characters to the open value; return their end."""
        self._value.append(data[at:end])
        return end

    def _tag(self, data: str, at: int, start: int) -> Reading | int:
        """Read a possible tag inside a value: the block may end before its last bracket."""
        rest = data[start : start + len(TOOL_END)]
        for tag in (TOOL_END, TOOL_START):
            if rest.startswith(tag):
                self._keep(data, at, start)
                self._close_early()
                size = self._size + start - at
                return Reading(size + (len(TOOL_END) if tag == TOOL_END else 0), self._calls)
        if not any(tag.startswith(rest) for tag in (TOOL_END, TOOL_START)):
            raise ValueError("no JSON")
        return start if start == at else self._keep(data, at, start)

    def _close(self, text: str) -> None:
        """Parse a finished value."""
        self._calls += calls_of(strict_json(text, lenient=True), self._tools)
        self._value = []

    def _close_early(self) -> None:
        """Parse an object without its last bracket."""
        text = "".join(self._value)
        if self._depth != 1 or self._in_text or not text.rstrip().endswith("}"):
            raise ValueError("no JSON")
        self._close(text + "}")
        self._depth = 0


def calls_of(value: Any, tools: Tools) -> list[Call]:
    """Return the calls of a block's JSON value.

    Raises:
        ValueError: the value is ambiguous or no call.
    """
    if isinstance(value, list):
        if not value:
            raise ValueError("no call")
        return [call for each in value for call in calls_of(each, tools)]
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
    return [Call(name, as_json(arguments))]


def _unpacked(value: Any) -> dict[str, Any]:
    """Return the arguments as an object; some models write them as a string of JSON."""
    if isinstance(value, str):
        value = strict_json(value, lenient=True) if value.strip() else {}
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def unfinished(text: str, tools: Tools) -> Call | str:
    """Return the call at the start of an incomplete JSON object.

    Return "begun" if its name is still missing, and "" if it is no call.
    """
    members: dict[str, Any] = {}
    last, value = "", ""
    try:
        for key, text_of_value, known in _members(text):
            last, value = key, text_of_value
            if known is not None:
                members.setdefault(key, known[0])
    except (ValueError, RecursionError):
        return ""
    name = members.get("name")
    if name is None:
        return "begun" if not {last, *members} & {*_ARGUMENTS} else ""
    try:
        if name in tools and any(members.get(key) for key in _ARGUMENTS):
            return calls_of(members, tools)[0]
        if name not in tools:
            return ""
        written = _TEXT.sub(lambda found: found.group().translate(_ESCAPES), value)
        if last not in _ARGUMENTS or not written.startswith("{"):
            return Call(name, "{")
        return Call(name, written.rstrip()) if begins_json(written) else ""
    except (ValueError, RecursionError, TypeError):
        return ""


def _members(text: str) -> Iterator[tuple[str, str, list[Any] | None]]:
    """Yield key, text and [value] of each member of an incomplete object.

    The last member's value may be None; with an incomplete key it is left out.

    Raises:
        ValueError: the text is no object.
    """
    if not text.startswith("{"):
        raise ValueError("no object")
    at = 1
    while at < len(text):
        at = _past(text, at, ",")
        try:
            key, at = _DECODER.raw_decode(text, at)
        except ValueError:
            return
        start = _past(text, at, ":")
        try:
            value, at = _DECODER.raw_decode(text, start)
        except ValueError:
            yield str(key), text[start:], None
            return
        yield str(key), text[start:at], [value]


def _past(text: str, at: int, sign: str) -> int:
    """Return the position after white space and a sign."""
    while at < len(text) and (text[at].isspace() or text[at] == sign):
        at += 1
    return at
