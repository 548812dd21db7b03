"""Reads grammars in EBNF: a rule per name, and `root` is the whole answer.

    root ::= "yes" | digits{2,3}  # a comment
    digits ::= [0-9] [^\\x41-\\u005a]* (root | "")?

Rules have texts in quotation marks, classes of characters, names, groups, alternatives and
repetitions. A rule may go on over lines, up to the next name with `::=`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar.searching import PatternError, escaped

ROOT = "root"
_DEPTH = 64
_SHALLOW = 8
_MOST_REPETITIONS = (1 << 31) - 1
_SPACE = r"(?:[ \t\r\n]|#[^\r\n]*)*+"
_NAME = r"[A-Za-z_.-][A-Za-z0-9_.-]*+"
_TOKEN = re.compile(
    rf"{_SPACE}(?:(?P<head>{_NAME}){_SPACE}::=|(?P<name>{_NAME})"
    r'|"(?P<text>(?:[^"\\\r\n]|\\[^\r\n])*+)"|\[(?P<set>(?:[^\]\\\r\n]|\\[^\r\n])*+)\]'
    r"|(?P<count>[*+?]|\{\s*\d{1,15}\s*(?:,\s*(?:\d{1,15}\s*)?)?\})|(?P<sign>\(=|[()|])"
    r"|(?P<end>\Z))"
)
_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]+)|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL
)
_CONTROLS = dict(zip("nrtabfve0", "\n\r\t\a\b\f\v\x1b\0", strict=True))
_QUOTED = "\"'?\\"
_QUOTED_IN_SET = _QUOTED + "^$.*+()[]{}|/-"
_MACROS = frozenset(["TagDispatch", "TokenTagDispatch", "Token", "ExcludeToken"])
_COUNTS: Mapping[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@dataclass(frozen=True, slots=True)
class Text:
    """One text."""

    text: str


@dataclass(frozen=True, slots=True)
class Sign:
    """One character of a class, as a pattern."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Name:
    """What a rule matches."""

    name: str


@dataclass(frozen=True, slots=True)
class Row:
    """Parts, one after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part, `least` to `most` times; None: any number of times."""

    part: Node
    least: int
    most: int | None


Node = Text | Sign | Name | Row | Choice | Repeat


def read(source: str) -> dict[str, Node]:
    """Return the rules of a grammar; each name in them has one.

    Raises:
        InvalidRequestError: it is invalid, or uses what cannot be enforced. The message names the
            line.
    """
    reader = _Reader(source)
    rules = reader.rules
    while not reader.ended:
        name = reader.take("head")
        if name in rules:
            reader.refuse(f"the rule {name[:64]!r} is there twice")
        rules[name] = reader.choice(1)
    for name, place in {ROOT: 0, **reader.named}.items():
        if name not in rules:
            reader.refuse(f"there is no rule {name[:64]!r}", place)
    return rules


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self.rules: dict[str, Node] = {}
        self.named: dict[str, int] = {}
        """The names in the rules, with their first places."""
        self._advance()

    def _advance(self) -> None:
        found = _TOKEN.match(self._source, self._at)
        if found is None:
            self._at = re.compile(_SPACE).match(self._source, self._at).end()  # type: ignore[union-attr]
            self.refuse(f"{self._source[self._at : self._at + 16]!r} cannot be read")
        self._kind = str(found.lastgroup)
        self._value = found[self._kind]
        self._at = found.end()

    def refuse(self, what: str, place: int | None = None) -> NoReturn:
        """Raise the error about a place; None: the current one."""
        line = 1 + self._source.count("\n", 0, self._at if place is None else place)
        raise InvalidRequestError(f"the grammar cannot be compiled: line {line}: {what}")

    @property
    def ended(self) -> bool:
        """True if nothing is left."""
        return self._kind == "end"

    def take(self, kind: str, value: str | None = None) -> str:
        """Return the token's text and go on.

        Raises:
            InvalidRequestError: it is of another kind or has another text.
        """
        if self._kind != kind or value not in (None, self._value):
            wanted = repr(value) if value else "a rule, as in: name ::="
            self.refuse(f"it needs {wanted} before {self._value[:64] or 'its end'!r}")
        taken = self._value
        self._advance()
        return taken

    def choice(self, depth: int) -> Node:
        """Read alternatives up to a closing bracket or the next rule."""
        if depth > _DEPTH:
            self.refuse(f"it is nested deeper than {_DEPTH} levels")
        parts = [self._row(depth)]
        while (self._kind, self._value) == ("sign", "|"):
            self._advance()
            parts.append(self._row(depth))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _row(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._kind in ("name", "text", "set") or self._value in ("(", "(="):
            part = self._part(depth)
            if self._kind == "count":
                part = Repeat(part, *self._bounds())
            parts.append(part)
        if not parts:
            self.refuse(f"an alternative is empty before {self._value[:64] or 'its end'!r}")
        return parts[0] if len(parts) == 1 else Row(tuple(parts))

    def _part(self, depth: int) -> Node:
        kind, value, place = self._kind, self._value, self._at
        self._advance()
        if kind == "text":
            return Text("".join(sign for sign, _ in self._signs(value, _QUOTED)))
        if kind == "set":
            return self._set(value)
        if kind == "name":
            if value in _MACROS and self._value == "(":
                self.refuse(f"{value} cannot be enforced")
            self.named.setdefault(value, place)
            return Name(value)
        if value == "(=":
            self.refuse("looking ahead with (= ...) cannot be enforced")
        empty = (self._kind, self._value) == ("sign", ")")
        part = Row(()) if empty else self.choice(depth + 1)
        self.take("sign", ")")
        if depth % _SHALLOW:
            return part
        name = f"({len(self.rules)}"  # the library has a limit for the brackets of one rule
        self.rules[name] = part
        return Name(name)

    def _bounds(self) -> tuple[int, int | None]:
        value = self.take("count")
        if value in _COUNTS:
            return _COUNTS[value]
        first, comma, last = (each.strip() for each in value[1:-1].partition(","))
        least, most = int(first), int(last) if last else None if comma else int(first)
        if most is not None and least > most:
            self.refuse(f"a repetition has more than {most} times at least")
        if max(least, most or 0) > _MOST_REPETITIONS:
            self.refuse(f"a repetition has more than {_MOST_REPETITIONS} times")
        return least, most

    def _set(self, value: str) -> Node:
        """Return a class of characters; one without any matches nothing."""
        negated = value.startswith("^")
        signs = self._signs(value[negated:], _QUOTED_IN_SET)
        parts, at = list[str](), 0
        while at < len(signs):
            first = last = signs[at][0]
            if signs[at + 1 : at + 2] == [("-", False)] and at + 2 < len(signs):
                at += 2
                last = signs[at][0]
            if first > last:
                self.refuse(f"a class has a range that ends before it begins: {value[:64]!r}")
            parts.append(escaped(first) if first == last else f"{escaped(first)}-{escaped(last)}")
            at += 1
        if not parts:
            return Sign(r"[\s\S]" if negated else r"[^\s\S]")
        return Sign(f"[{'^' if negated else ''}{''.join(parts)}]")

    def _signs(self, value: str, quoted: str) -> list[tuple[str, bool]]:
        """Return the characters of a text or a class, and whether each is escaped."""
        found = []
        for match in _CHARACTER.finditer(value):
            sign = match[5] or match[4]
            try:
                if sign is None:
                    sign = chr(int(match[1] or match[2] or match[3], 16))
                elif match[4]:
                    sign = sign if sign in quoted else _CONTROLS[sign]
                escaped(sign)
            except (KeyError, ValueError, OverflowError, PatternError):
                self.refuse(f"{match[0][:16]} is no character")
            found.append((sign, match[5] is None))
        return found
