"""Kinds of the values that a JSON schema may accept: its types, with 2.0 as an integer.

The grammar of a call in tags and the reader of the call use the same functions here. So a text that
the grammar allows as a string is never read as another kind, or the other way round.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from vlm_serve.grammar.references import Document, listed

Kinds = frozenset[str]
NUMBERS: Kinds = frozenset(["integer", "number"])
ALL: Kinds = NUMBERS | {"string", "boolean", "null", "array", "object"}
_NONE: Kinds = frozenset()
_DEPTH = 64


def kind_of(value: Any) -> str:
    """Return the kind of a value."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {str: "string", int: "integer", list: "array", dict: "object"}
    return names.get(type(value), "null")


def is_of(value: Any, kinds: Container[str]) -> bool:
    """Return True if a value is of one of the types that a schema names."""
    kind = kind_of(value)
    return kind in kinds or (kind == "integer" and "number" in kinds)


def own_kinds(node: Any) -> Kinds:
    """Return the kinds by a schema's own types and lists of values."""
    if not isinstance(node, Mapping):
        return ALL if node is not False else _NONE
    kinds, values = node.get("type"), allowed(node)
    listed = [kinds] if isinstance(kinds, str) else kinds
    accepted = ALL
    if isinstance(listed, list):
        accepted = frozenset(str(kind) for kind in listed)
        accepted |= NUMBERS if "number" in accepted else _NONE
    return accepted if values is None else accepted & {kind_of(value) for value in values}


def allowed(node: Mapping[str, Any]) -> list[Any] | None:
    """Return the only values that a schema lists; None: it lists none."""
    if "const" in node:
        return [node["const"]]
    return node["enum"] if isinstance(node.get("enum"), list) else None


def kinds_of(node: Any, document: Document) -> Kinds:
    """Return the kinds of the values that a schema and its combinations may accept."""
    return _kinds(node, document, {}, _DEPTH)


def _kinds(node: Any, document: Document, known: dict[int, Kinds], depth: int) -> Kinds:
    accepted = own_kinds(node)
    if not isinstance(node, Mapping) or not depth or not accepted:
        return accepted
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = accepted  # what it refers to may refer to it
    for part in [*document.named_by(node), *listed(node, "allOf")]:
        accepted &= _kinds(part, document, known, depth - 1)
    for keyword in ("anyOf", "oneOf"):
        if listed(node, keyword):
            parts = [_kinds(part, document, known, depth - 1) for part in node[keyword]]
            accepted &= frozenset().union(*parts)
    known[id(node)] = accepted
    return accepted


def kinds_of_parameter(document: Document, name: str) -> Kinds:
    """Return the kinds of a property's values, wherever the document speaks of it.

    Where an alternative does not name it, the alternative's rules for other properties speak of it.
    If nothing does, all rules for other properties decide.
    """
    schemas: list[Any] = []
    unnamed: list[Any] = []
    others: list[Any] = []
    for node in document.same_value(document.root):
        properties, patterns = node.get("properties"), node.get("patternProperties")
        named = isinstance(properties, Mapping) and name in properties
        if isinstance(properties, Mapping) and named:
            schemas.append(properties[name])
        rest = node.get("additionalProperties")
        rules = list(patterns.values()) if isinstance(patterns, Mapping) else []
        others += [*rules, True if rest is None else rest]
        if not named:  # where any value fits, any reading does
            unnamed += [rule for rule in (*rules, rest) if rule not in (None, True, {})]
    told = [*schemas, *unnamed] if schemas else others
    kinds = [kinds_of(schema, document) for schema in told if schema is not None]
    return frozenset().union(*kinds) or ALL
