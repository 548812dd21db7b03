"""Common parts of the alternatives of a JSON schema, and values that tell them apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar.kinds import allowed, own_kinds
from vlm_serve.grammar.references import Document


def discriminator(branches: list[Any], document: Document) -> str | None:
    """Return a property whose values tell all branches apart; "": their types do; None: neither."""
    kinds = [_kinds(branch) for branch in branches]
    if sum(map(len, kinds)) == len(frozenset().union(*kinds)):
        return ""
    if any(each != {"object"} for each in kinds):
        return None
    for name in _properties(branches[0]):
        values = [_values(document.resolved(_properties(each).get(name))) for each in branches]
        if None not in values:
            found = [value for each in values for value in each or ()]
            if len(found) == len(set(found)):
                return name
    return None


def exclusive(branches: list[Any], document: Document) -> list[list[str]] | None:
    """Return the names that each branch must lack so that only one fits; None: there are none."""
    needed: list[set[str]] = []
    for branch in branches:
        if not isinstance(branch, Mapping) or not isinstance(branch.get("required"), list):
            return None
        needed.append({name for name in branch["required"] if isinstance(name, str)})
    if _kinds(branches[0]) != {"object"} and any("type" in each for each in branches):
        return None
    everything = set().union(*needed)
    for index, names in enumerate(needed):
        if any(not other - names for at, other in enumerate(needed) if at != index):
            return None
    return [sorted(everything - names) for names in needed]


def names_of(node: Any, document: Document) -> tuple[list[str], bool]:
    """Return the properties that a schema and its combinations name, and whether it is a map."""
    names: dict[str, None] = {}
    is_map = False
    open_nodes, seen = [node], set()
    while open_nodes:
        node = open_nodes.pop(0)
        if not isinstance(node, Mapping) or id(node) in seen:
            continue
        seen.add(id(node))
        names |= dict.fromkeys(_properties(node))
        names |= dict.fromkeys(each for each in node.get("required") or () if isinstance(each, str))
        is_map |= any(
            node.get(each) not in (None, False)
            for each in ("additionalProperties", "patternProperties", "propertyNames")
        )
        if isinstance(node.get("$ref"), str):
            try:
                open_nodes.append(document.target(node["$ref"], "#"))
            except InvalidRequestError:
                continue
        for keyword in ("allOf", "anyOf", "oneOf"):
            if isinstance(node.get(keyword), list):
                open_nodes += node[keyword]
        for keyword in ("dependentRequired", "dependencies"):
            if isinstance(node.get(keyword), Mapping):
                for name, others in node[keyword].items():
                    names |= dict.fromkeys([name, *(others if isinstance(others, list) else ())])
    return list(names), is_map


def _kinds(node: Any) -> frozenset[str]:
    """Return the types of the values that a schema may accept, integers as numbers."""
    return frozenset("number" if each == "integer" else each for each in own_kinds(node))


def _properties(node: Any) -> Mapping[str, Any]:
    found = node.get("properties") if isinstance(node, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _values(node: Any) -> list[str] | None:
    """Return the texts of the only values that a schema accepts; None: there are others."""
    values = allowed(node) if isinstance(node, Mapping) else None
    if values is None or any(isinstance(value, int | float | list | dict) for value in values):
        return None  # 1 equals 1.0
    return [json.dumps(value) for value in dict.fromkeys(values)]
