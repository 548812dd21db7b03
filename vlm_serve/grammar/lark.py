"""Writes grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from typing import Any

from vlm_serve.grammar.searching import literal

OPTIONS: dict[str, Any] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}
"""How JSON is written. White space is fixed: small models would emit it forever."""
_BYTES = r"~/[^\s\S]/"
"""Any bytes, UTF-8 or not. The negation of `.*` leaves some, and the library would search whole
repetitions beside it for them."""
_NAME = re.compile(r"\b[rxT][0-9]+\b")
_PRINTABLE = re.compile(r"[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]*")


class Lark:
    """A grammar that grows. Equal parts are written once, under one name."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def rule(self, body: str) -> str:
        """Return the name of a rule."""
        return self._named("r", body)

    def define(self, name: str, body: str) -> None:
        """Give a rule a name of its own."""
        self._bodies[name] = body

    def terminal(self, body: str) -> str:
        """Return the name of a terminal: a pattern matched as one."""
        return self._named("T", body)

    def alone(self, body: str) -> str:
        """Return the grammar of a terminal."""
        return f"start: T\nT: {body}\n{self._named_in(body)}"

    def json(self, schema: Any) -> str:
        """Return the name of a rule for the JSON of a rewritten schema."""
        whole = {} if schema is True else schema
        return self.rule("%json " + json.dumps({"x-guidance": OPTIONS, **whole}))

    def text(self, start: str) -> str:
        """Return the whole grammar.

        Args:
            start: the body of its start.
        """
        return f"start: {start}\n{self._named_in(start)}"

    def _named_in(self, body: str) -> str:
        """Return the lines of all that a body names."""
        lines, waiting = dict[str, str](), [body]
        while waiting:  # a text may look like a name: a line is then there in vain
            for name in _NAME.findall(waiting.pop()):
                if name in self._bodies and name not in lines:
                    lines[name] = f"{name}: {self._bodies[name]}\n"
                    waiting.append(self._bodies[name])
        return "".join(lines.values())

    def _named(self, prefix: str, body: str) -> str:
        if body not in self._names:
            self._names[body] = f"{prefix}{len(self._names)}"
            self._bodies[self._names[body]] = body
        return self._names[body]


def constant(text: str) -> str:
    """Return one text, in a rule or a terminal."""
    if _PRINTABLE.fullmatch(text):
        return json.dumps(text, ensure_ascii=False)
    return pattern(literal(text))


def pattern(text: str) -> str:
    """Return a pattern, in a rule or a terminal. It has no plain slash."""
    return f"/{text}/"


def without(*parts: str, whole: bool = False) -> str:
    """Return the terminal of all bytes without these terminals in a row.

    Args:
        whole: they must stand at the start, with anything behind them.
    """
    return f"~({'' if whole else f'{_BYTES} '}{' '.join(parts)} {_BYTES})"


def either(parts: list[str]) -> str:
    """Return alternatives; "": there are none."""
    kept = list(dict.fromkeys(part for part in parts if part))
    return kept[0] if len(kept) == 1 else f"({' | '.join(kept)})" if kept else ""
