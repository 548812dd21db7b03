"""Tool calls as Qwen3-VL, Qwen3-Next and Hermes write them.

<tool_call>
{"name": "name", "arguments": {"key": value}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from vlm_serve.server.pieces import TOOL_END, Piece
from vlm_serve.server.tool_values import strict_json

_STRUCTURE = re.compile(r'["{}\[\],<]')
_IN_TEXT = re.compile(r'["\\\x00-\x1f]')
_ARGUMENTS = re.compile(r'\s*"arguments"\s*:\s*')


class HermesCall:
    """A `CallParser` of this form; emits the name, then the arguments one member at a time.

    Every character is looked at once. What is no JSON ends the call where it begins, and so does a
    closing tag outside of a text.
    """

    def __init__(self, index: int, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.index = index
        self.named = False
        self._tools = tools
        self._name: object = None
        self._read: list[tuple[str, Any]] = []
        self._keys: set[str] = set()
        self._at = self._member = self._depth = 0
        self._in_text = self._in_arguments = False
        self._whole = self._over = False

    def advance(self, block: str) -> list[Piece]:
        """See `CallParser.advance`."""
        try:
            while not self._over and self._at < len(block) and self._step(block):
                pass
        except (ValueError, RecursionError):
            self._over = True
        if not self.named and isinstance(self._name, str) and self._name in self._tools:
            self.named = True
            return [Piece("tool_name", self._name, self.index), *self._arguments()]
        return self._arguments() if self.named else []

    def end(self, block: str) -> int:
        """See `CallParser.end`."""
        return block.find(TOOL_END, self._at) if self._over else -1

    def may_become_call(self, block: str) -> bool:
        """See `CallParser.may_become_call`."""
        return not self._over and self._name is None

    def close(self) -> list[Piece]:
        """See `CallParser.close`."""
        return self._said("}" if self._keys else "{}")

    def rest(self, block: str) -> list[Piece]:
        """See `CallParser.rest`."""
        if self._whole:
            return self.close()
        written = block[self._member :].lstrip() if self._in_arguments and not self._over else ""
        if not self._in_text:
            written = written.rstrip()
        if not written:
            return [] if self._keys else self._said("{")
        return self._said((", " if self._keys else "{") + written)

    def _step(self, block: str) -> bool:
        """Goes on to the next character that matters; False if there is none yet."""
        found = (_IN_TEXT if self._in_text else _STRUCTURE).search(block, self._at)
        if found is None:
            self._at = len(block)
            if not self._depth and block.strip():
                raise ValueError("no object")
            return False
        sign, at = found.group(), found.start()
        if sign == "\\":
            if at + 1 == len(block):  # what is escaped is yet to come
                self._at = at
                return False
            self._at = at + 2
            return True
        self._at = at
        if sign == '"':
            self._in_text = not self._in_text
        elif self._in_text or sign == "<":
            raise ValueError("no JSON")
        elif sign == ",":
            self._end_member(block, at)
        else:
            self._nest(block, sign, at)
        self._at = at + 1
        return True

    def _nest(self, block: str, sign: str, at: int) -> None:
        if sign in "{[":
            between = block[self._member : at]
            if self._depth == 0 and (sign == "[" or between.strip()):
                raise ValueError("no object")
            known = sign == "{" and self._depth == 1 and not self._whole
            self._depth += 1
            if self._depth == 1:
                self._member = at + 1
            elif known and _ARGUMENTS.fullmatch(between):
                self._in_arguments, self._member = True, at + 1
            return
        self._end_member(block, at)
        self._depth -= 1
        if self._depth == 1 and self._in_arguments:
            if sign == "]":
                raise ValueError("no object")
            self._in_arguments, self._whole = False, True
        elif self._depth <= 0:
            self._over = True

    def _end_member(self, block: str, at: int) -> None:
        """Reads the member of the call, or of its arguments, that ends here, if one does."""
        if self._depth != (2 if self._in_arguments else 1):
            return
        text, self._member = block[self._member : at], at + 1
        if not text.strip():  # behind the arguments, or of an empty object
            return
        ((key, value),) = strict_json("{" + text + "}").items()
        if self._in_arguments:
            self._read.append((key, value))
        elif key == "name" and self._name is None:
            self._name = value
        elif key == "arguments" and not self._whole:
            self._read += self._unpacked(value)
            self._whole = True

    @staticmethod
    def _unpacked(value: Any) -> list[tuple[str, Any]]:
        """Of arguments that are no object: some models write its text."""
        value = strict_json(value) if isinstance(value, str) and value.strip() else value or {}
        if not isinstance(value, dict):
            raise ValueError("no object")
        return list(value.items())

    def _arguments(self) -> list[Piece]:
        pieces = []
        for key, value in self._read:
            if key not in self._keys:
                opening = ", " if self._keys else "{"
                self._keys.add(key)
                said = f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
                pieces += self._said(opening + said)
        self._read = []
        return pieces

    def _said(self, text: str) -> list[Piece]:
        return [Piece("tool_arguments", text, self.index)]
