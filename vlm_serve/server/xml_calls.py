"""Tool calls as Qwen3.5 writes them.

<tool_call>
<function=name>
<parameter=key>
value
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from vlm_serve.server.pieces import TOOL_END, Piece, begun
from vlm_serve.server.tool_values import is_no_text, read

_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,256})>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,256})>(.*?)</parameter>", re.DOTALL)
_PARAMETER_END = "</parameter>"
_FUNCTION_END = "</function>"
_OPEN_PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})(?:>(.*))?\Z", re.DOTALL)
_NAMELESS = re.compile(r"\s*(?:<[^>]{0,265})?")


class XmlCall:
    """A `CallParser` of this form; emits the name, then the arguments one parameter at a time."""

    def __init__(self, index: int, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.index = index
        self.named = False
        self._tools = tools
        self._schema: Mapping[str, Any] = {}
        self._position = 0
        self._keys: set[str] = set()

    def advance(self, block: str) -> list[Piece]:
        """See `CallParser.advance`."""
        end, pieces = self.end(block), []
        if end >= 0:
            block = block[:end]
        if not self.named:
            found = _FUNCTION.match(block)
            if found is None or found.group(1).strip() not in self._tools:
                return []
            self.named = True
            self._schema = self._tools[found.group(1).strip()]
            self._position = found.end()
            pieces.append(Piece("tool_name", found.group(1).strip(), self.index))
        # Looked for first: the pattern would read a long value again with every token of it.
        while block.find(_PARAMETER_END, self._position) >= 0:
            found = _PARAMETER.match(block, self._position)
            if found is None:
                break
            self._position = found.end()
            key = found.group(1).strip()
            if key in self._keys:
                continue
            opening = ", " if self._keys else "{"
            self._keys.add(key)
            value = read(found.group(2), self._parameter(key), self._schema)
            text = f"{opening}{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
            pieces.append(Piece("tool_arguments", text, self.index))
        return pieces

    def _parameter(self, key: str) -> Any:
        properties = self._schema.get("properties")
        return properties.get(key) if isinstance(properties, Mapping) else None

    def end(self, block: str) -> int:
        """See `CallParser.end`."""
        return block.find(TOOL_END)

    def may_become_call(self, block: str) -> bool:
        """See `CallParser.may_become_call`."""
        return _NAMELESS.fullmatch(block) is not None

    def close(self) -> list[Piece]:
        """See `CallParser.close`."""
        return [Piece("tool_arguments", "}" if self._keys else "{}", self.index)]

    def rest(self, block: str) -> list[Piece]:
        """See `CallParser.rest`."""
        rest = block[self._position :].lstrip()
        if rest.startswith(_FUNCTION_END):
            return self.close()
        opening = ", " if self._keys else "{"
        found = _OPEN_PARAMETER.match(rest)
        if found is None or found.group(1).strip() in self._keys:
            return [] if self._keys else self._said("{")
        key, value = found.group(1).strip(), found.group(2)
        if value is None:
            return self._said(opening + json.dumps(key, ensure_ascii=False)[:-1])
        value = value.removeprefix("\n")
        value = value[: len(value) - begun(value, "\n" + _PARAMETER_END)]
        value = value[: len(value) - begun(value, _PARAMETER_END)]
        text = json.dumps(value, ensure_ascii=False)[:-1]
        if is_no_text(self._parameter(key), self._schema):
            text = value.strip()
        return self._said(f"{opening}{json.dumps(key)}: {text}")

    def _said(self, text: str) -> list[Piece]:
        return [Piece("tool_arguments", text, self.index)]
