"""Patterns of requests and JSON schemas as patterns of whole texts, in the syntax of Rust.

A pattern of a schema may match anywhere in a text and has anchors. Those of a grammar match whole
texts. Where engines differ about a class of characters, a schema's has only the common ones: other
programs check the answer. In a request's own patterns `.` is any character.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

ANY = "(?s:.*)"
_MOST = 256
"""Branches that a pattern with anchors inside groups may be split into."""
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})\??")
_GROUP = re.compile(r"\((\?:|\?P?<[A-Za-z_]\w*>)?(?!\?)")
_HEX = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\})")
_PROPERTY = re.compile(r"\\[pP](?:[A-Z]|\{[A-Za-z_=]+\})")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\x0b\x0c"}
# Python has numbers among letters, and separators of data among spaces; ECMA-262 has U+FEFF there.
_WIDE = {"d": r"\p{Nd}", "w": r"\w\p{N}", "s": r"\s\x{1c}-\x{1f}\x{feff}"}
_DOT = r"[^\n\r\x{2028}\x{2029}]"
_REQUEST_CLASSES = _CLASSES | {"s": r" \t\n\r\x0b\x0c\xa0"}
_REQUEST_DOT = r"[\s\S]"
_ASCII = re.compile(r"(?:[\x00-\x5b\x5d-\x7f]|\\[nrt]|\\x[0-7][0-9a-f]|\\x\{[0-7]?[0-9a-f]\})*")


class PatternError(ValueError):
    """The pattern is invalid, or has a part that no grammar can follow."""


@dataclass(slots=True)
class _Item:
    """A part of a concatenation: an anchor, a group of branches, or a single character."""

    text: str
    branches: list[list[_Item]] | None = None
    quantifier: str = ""
    anchored: bool = field(init=False)

    def __post_init__(self) -> None:
        inner = [item for branch in self.branches or () for item in branch]
        self.anchored = self.text in ("^", "$") or any(item.anchored for item in inner)

    def written(self) -> str:
        if self.anchored:
            raise PatternError("has an anchor inside, which no grammar can follow")
        if self.branches is None:
            return self.text + self.quantifier
        inner = "|".join("".join(item.written() for item in branch) for branch in self.branches)
        return f"(?:{inner}){self.quantifier}"


def whole(pattern: str) -> str:
    """Return a pattern of all texts in which a pattern of a schema is found.

    Raises:
        PatternError: a grammar cannot follow it.
    """
    return _joined(_parsed(pattern), ANY)


def full(pattern: str) -> str:
    """Return a pattern of all texts that a request's own pattern matches as a whole.

    Raises:
        PatternError: a grammar cannot follow it.
    """
    return _joined(
        _parsed(pattern, _Parser(pattern, _REQUEST_DOT, _REQUEST_CLASSES, _REQUEST_CLASSES)), ""
    )


def is_ascii(pattern: str) -> bool:
    """Return True if a pattern of a schema certainly matches whole texts of ASCII alone."""
    try:
        text = whole(pattern)
    except PatternError:
        return False
    return ANY not in text and "[^" not in text and _ASCII.fullmatch(text) is not None


def literal(text: str) -> str:
    """Return a pattern of one text."""
    return "".join(escaped(sign) for sign in text)


def _joined(branches: list[list[_Item]], open_end: str) -> str:
    """Return the alternatives, with what may stand at an end without an anchor."""
    done: list[str] = []
    waiting = [(branch, open_end, open_end) for branch in reversed(branches)]
    while waiting:
        items, before, after = waiting.pop()
        while items and items[0].text == "^" and not items[0].quantifier:
            items, before = items[1:], ""
        while items and items[-1].text == "$" and not items[-1].quantifier:
            items, after = items[:-1], ""
        ends = [at for at in (0, len(items) - 1) if items and _opens(items[at])]
        if ends:
            at = ends[0]
            parts = items[at].branches or []
            waiting += [(items[:at] + part + items[at + 1 :], before, after) for part in parts]
            if len(done) + len(waiting) > len(branches) + _MOST:
                raise PatternError("has anchors in too many places")
        else:
            done.append(before + "".join(item.written() for item in items) + after)
    return f"(?:{'|'.join(done)})"


def _opens(item: _Item) -> bool:
    return item.branches is not None and item.anchored and not item.quantifier


def _parsed(pattern: str, parser: _Parser | None = None) -> list[list[_Item]]:
    parser = parser or _Parser(pattern)
    branches = parser.branches(0)
    if parser.at < len(pattern):
        raise PatternError("has a closing bracket too many")
    return branches


class _Parser:
    """Reads one pattern.

    Args:
        pattern: its text.
        dot: what a dot means.
        narrow: members of the classes with a small letter.
        wide: characters that are in none of their complements.
    """

    def __init__(
        self,
        pattern: str,
        dot: str = _DOT,
        narrow: Mapping[str, str] = _CLASSES,
        wide: Mapping[str, str] = _WIDE,
    ) -> None:
        self._pattern = pattern
        self._dot, self._narrow, self._wide = dot, narrow, wide
        self.at = 0

    def branches(self, depth: int) -> list[list[_Item]]:
        """Read alternatives up to a closing bracket, or the end."""
        if depth > 64:
            raise PatternError("is nested too deeply")
        branches: list[list[_Item]] = [[]]
        while self.at < len(self._pattern) and self._pattern[self.at] != ")":
            if self._pattern[self.at] == "|":
                self.at += 1
                branches.append([])
            else:
                branches[-1].append(self._item(depth))
        return branches

    def _item(self, depth: int) -> _Item:
        sign = self._pattern[self.at]
        branches = None
        if sign == "(":
            branches, text = self._group(depth), ""
        elif sign == "[":
            text = self._class()
        elif sign == "\\":
            text = self._escape()
        elif _QUANTIFIER.match(self._pattern, self.at):
            raise PatternError("repeats nothing")
        else:
            self.at += 1
            text = self._dot if sign == "." else sign if sign in "^$" else escaped(sign)
        return _Item(text, branches, self._quantifier())

    def _group(self, depth: int) -> list[list[_Item]]:
        start = _GROUP.match(self._pattern, self.at)
        if start is None:
            raise PatternError("looks ahead or behind or has flags, which no grammar can follow")
        self.at = start.end()
        branches = self.branches(depth + 1)
        if self._pattern[self.at : self.at + 1] != ")":
            raise PatternError("has an open bracket")
        self.at += 1
        return branches

    def _quantifier(self) -> str:
        quantifier = _QUANTIFIER.match(self._pattern, self.at)
        if quantifier is None:
            return ""
        self.at = quantifier.end()
        text = quantifier.group()
        return text.removesuffix("?") if len(text) > 1 else text

    def _class(self) -> str:
        pattern, negated = self._pattern, self._pattern[self.at + 1 : self.at + 2] == "^"
        self.at += 2 if negated else 1
        parts = []
        while self.at < len(pattern) and pattern[self.at] != "]":
            if pattern[self.at] == "\\":
                parts.append(self._escape(inside=True, negated=negated))
                continue
            sign, after = pattern[self.at], pattern[self.at + 1 : self.at + 2]
            ranged = sign == "-" and after not in ("", "]") and _may_begin_range(parts)
            parts.append("-" if ranged else escaped(sign))
            self.at += 1
        if self.at >= len(pattern):
            raise PatternError("has an open class of characters")
        self.at += 1
        if not parts:
            return r"[\s\S]" if negated else r"[^\s\S]"
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _escape(self, *, inside: bool = False, negated: bool = False) -> str:
        pattern, at = self._pattern, self.at
        escape = _HEX.match(pattern, at)
        if escape is not None:
            self.at = escape.end()
            return escaped(chr(int(next(filter(None, escape.groups())), 16)))
        escape = _PROPERTY.match(pattern, at)
        if escape is not None:
            self.at = escape.end()
            return escape.group()
        sign = pattern[at + 1 : at + 2]
        if not sign:
            raise PatternError("ends in a backslash")
        self.at += 2
        if sign.lower() in _CLASSES:
            return self._class_of(sign, negated=negated)
        if inside and sign == "b":
            return r"\x08"
        if sign in "bB" or sign in "123456789kc":
            raise PatternError(f"has \\{sign}, which no grammar can follow")
        return escaped(_CONTROLS.get(sign, sign))

    def _class_of(self, sign: str, *, negated: bool) -> str:
        """Return `\\d` and its kind; fewer characters mean more in a class that is negated."""
        name = sign.lower()
        narrow, wide = self._narrow[name], self._wide[name]
        if sign == name:
            return wide if negated else f"[{narrow}]"
        return f"[^{narrow}]" if negated else f"[^{wide}]"


def _may_begin_range(parts: list[str]) -> bool:
    """Return True if the last part of a class is one character that ends no range."""
    if not parts or parts[-2:-1] == ["-"]:
        return False
    return parts[-1][:1] != "[" and parts[-1][:2] not in (r"\p", r"\P", r"\w", r"\s")


def escaped(sign: str) -> str:
    """Return a character as a pattern, inside a class or outside of it."""
    if sign.isalnum() or sign == "_":
        return sign
    code = ord(sign)
    if 0xD800 <= code <= 0xDFFF:
        raise PatternError("has half of a character")
    return f"\\x{{{code:x}}}"
