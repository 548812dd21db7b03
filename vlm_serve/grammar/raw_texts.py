"""Strings that fit a rewritten JSON schema, as a terminal without quotation marks.

A terminal can be intersected and negated, so that all keywords for strings are held beside each
other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vlm_serve.grammar import searching
from vlm_serve.grammar.forms import KEYWORDS_OF
from vlm_serve.grammar.kinds import allowed, kind_of, own_kinds
from vlm_serve.grammar.lark import Lark, constant, either, pattern
from vlm_serve.grammar.lengths import Bounds

ANY = pattern(searching.ANY)
_MOST_EXCLUSIVE = 16
_DEPTH = 16
_NONE: Bounds = (1, 0)
"""Bounds that no string keeps."""


class RawTexts:
    """Writes the terminals of one schema.

    Args:
        lark: the grammar that gets terminals for definitions.
        definitions: rewritten schemas that a `$ref` may name.
    """

    def __init__(self, lark: Lark, definitions: Mapping[str, Any]) -> None:
        self._lark = lark
        self._definitions = definitions
        self._known: dict[str, str] = {}
        self._answers: dict[tuple[int, Any], bool] = {}

    def terminal(self, node: Any) -> str:
        """Return the strings that fit a schema, as part of a terminal.

        "" if there are none, `ANY` if all do.

        Raises:
            PatternError: a grammar cannot follow one of its patterns.
        """
        if isinstance(node, bool):
            return ANY if node else ""
        if "string" not in own_kinds(node):
            return ""
        parts = self._own(node)
        if "$ref" in node:
            parts.append(self._definition(node["$ref"]))
        parts += [self.terminal(part) for part in node.get("allOf", ())]
        if "anyOf" in node:
            parts.append(_any([self.terminal(part) for part in node["anyOf"]]))
        if "oneOf" in node:
            parts.append(_one([self.terminal(part) for part in node["oneOf"]]))
        return both(parts)

    def _own(self, node: Mapping[str, Any]) -> list[str]:
        shortest, longest = node.get("minLength", 0), node.get("maxLength")
        values = allowed(node)
        if values is not None:
            texts = [each for each in values if isinstance(each, str)]
            fitting = [each for each in texts if shortest <= len(each)
                       and (longest is None or len(each) <= longest)]  # fmt: skip
            parts = [either([constant(each) for each in fitting])]
        elif shortest or longest is not None:
            parts = [pattern(f"(?s:.{{{shortest},{'' if longest is None else longest}}})")]
            if longest is not None and shortest > longest:
                parts = [""]
        else:
            parts = []
        if "pattern" in node:
            parts.append(pattern(searching.whole(node["pattern"])))
        return parts

    def lengths(self, node: Any) -> Bounds | None:
        """Return the bounds of the strings that fit; None: there are other rules, or none fit."""
        bounds = self._lengths(node, _DEPTH)
        return None if bounds == _NONE else bounds

    def _lengths(self, node: Any, depth: int) -> Bounds | None:
        if node is True:
            return 0, None
        if node is False or "string" not in own_kinds(node):
            return _NONE
        if not depth or allowed(node) is not None or node.keys() & {"pattern", "oneOf"}:
            return None
        least, most = node.get("minLength", 0), node.get("maxLength")
        if not isinstance(least, int) or not isinstance(most, int | None):
            return None
        parts: list[Bounds | None] = [(least, most)]
        parts += [self._lengths(part, depth - 1)
                  for part in (*node.get("allOf", ()), *self._referred(node))]  # fmt: skip
        if "anyOf" in node:
            each = {self._lengths(part, depth - 1) for part in node["anyOf"]} - {_NONE}
            parts.append(each.pop() if len(each) == 1 else None)
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        least = max(part[0] for part in known)
        most = min((part[1] for part in known if part[1] is not None), default=None)
        return (least, most) if most is None or least <= most else None

    def _definition(self, reference: str) -> str:
        name = reference.rsplit("/", 1)[-1]
        if name not in self._known:
            self._known[name] = ""  # a definition that is itself has no text
            found = self.terminal(self._definitions[name])
            self._known[name] = found if found in ("", ANY) else self._lark.terminal(found)
        return self._known[name]

    def takes_all(self, node: Any, kind: str) -> bool:
        """Return True if all values of a kind certainly fit a schema."""
        if isinstance(node, bool):
            return node
        if kind not in own_kinds(node) or allowed(node) is not None or "oneOf" in node:
            return False
        if node.keys() & KEYWORDS_OF[kind]:
            return False
        parts = [*node.get("allOf", ()), *self._referred(node)]
        return self._combined(node, parts, kind, lambda part: self.takes_all(part, kind))

    def takes(self, node: Any, value: bool | None) -> bool:
        """Return True if true, false or null fits a schema."""
        if isinstance(node, bool):
            return node
        values = allowed(node)
        listed = values is None or any(each is value for each in values)
        if not listed or kind_of(value) not in own_kinds(node):
            return False
        fitting = [part for part in node.get("oneOf", ()) if self.takes(part, value)]
        if "oneOf" in node and len(fitting) != 1:
            return False
        parts = [*node.get("allOf", ()), *self._referred(node)]
        return self._combined(node, parts, value, lambda part: self.takes(part, value))

    def _combined(
        self, node: Any, parts: list[Any], about: Any, fits: Callable[[Any], bool]
    ) -> bool:
        """Return True if all parts fit, and one alternative. Each definition is asked once."""
        key = (id(node), about)
        if key not in self._answers:
            self._answers[key] = False  # a definition that is only itself
            found = all(fits(part) for part in parts)
            found = found and ("anyOf" not in node or any(fits(part) for part in node["anyOf"]))
            self._answers[key] = found
        return self._answers[key]

    def _referred(self, node: Mapping[str, Any]) -> list[Any]:
        return [self._definitions[node["$ref"].rsplit("/", 1)[-1]]] if "$ref" in node else []


def both(parts: list[str]) -> str:
    """Return what all parts have in common."""
    if "" in parts:
        return ""
    kept = list(dict.fromkeys(part for part in parts if part != ANY))
    if all(part.startswith("~") for part in kept):  # what is no text may be no UTF-8 either
        kept.insert(0, ANY)
    return f"({' & '.join(kept)})" if len(kept) > 1 else kept[0] if kept else ANY


def _any(parts: list[str]) -> str:
    return ANY if ANY in parts else either(parts)


def _one(parts: list[str]) -> str:
    """Return what exactly one part has."""
    kept = [part for part in parts if part]
    if len(kept) > _MOST_EXCLUSIVE:
        raise searching.PatternError("has a oneOf of too many strings")
    single = [
        both([part, *(f"~{other}" for at, other in enumerate(kept) if at != index)])
        for index, part in enumerate(kept)
    ]
    return _any(single)
