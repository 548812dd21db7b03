"""The shapes of the objects that fit a rewritten schema: which properties they have, in what order.

Every combination of alternatives is a shape of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from typing import Any

from vlm_serve.grammar.kinds import allowed, own_kinds
from vlm_serve.grammar.references import refuse

_MOST = 64
_DEPTH = 32
Matches = Callable[[str, str], bool]
"""Tells whether a pattern is found in a name."""
_LAYER = ("properties", "patternProperties", "additionalProperties")


@dataclass(frozen=True, slots=True)
class Shape:
    """Objects of one shape.

    Attributes:
        layers: schemas that speak of properties; all of them hold.
        required: the names that must be there.
        least: the number of properties that must be there.
        most: the number that may be there; None: any.
    """

    layers: tuple[Mapping[str, Any], ...] = ()
    required: frozenset[str] = frozenset()
    least: int = 0
    most: int | None = None
    names: tuple[str, ...] = field(init=False, default=())
    """All names that the layers speak of, in order."""

    def __post_init__(self) -> None:
        known = [name for layer in self.layers for name in layer.get("properties", ())]
        object.__setattr__(self, "names", tuple(dict.fromkeys([*known, *sorted(self.required)])))

    @property
    def patterns(self) -> list[str]:
        found = [each for layer in self.layers for each in layer.get("patternProperties", ())]
        return list(dict.fromkeys(found))

    def schema(self, name: str, matches: Matches) -> Any:
        """Return the schema of a property's value."""
        return _all([part for layer in self.layers for part in _parts(layer, name, matches)])

    def others(self) -> list[tuple[str | None, Any]]:
        """Return (pattern of the name, schema) of other properties; None: no pattern fits."""
        found: list[tuple[str | None, Any]] = []
        for each in (*self.patterns, None):
            parts = []
            for layer in self.layers:
                patterns = layer.get("patternProperties", {})
                rest = layer.get("additionalProperties", True)
                parts.append(rest if each is None else patterns.get(each, rest))
            schema = _all(parts)
            if schema is not False:
                found.append((each, schema))
        return found

    def joined(self, other: Shape) -> Shape:
        """Return the shape of the objects that have both."""
        bounds = [most for most in (self.most, other.most) if most is not None]
        return Shape(
            tuple({id(layer): layer for layer in (*self.layers, *other.layers)}.values()),
            self.required | other.required,
            max(self.least, other.least),
            min(bounds, default=None),
        )


def shapes_of(node: Any, definitions: Mapping[str, Any]) -> list[Shape]:
    """Return the shapes of the objects that fit a rewritten schema.

    Raises:
        InvalidRequestError: there are too many, or a list of values stands for them.
    """
    return _Shapes(definitions).of(node, "#", _DEPTH)


class _Shapes:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._known: dict[str, list[Shape]] = {}

    def of(self, node: Any, path: str, depth: int) -> list[Shape]:
        """Return the shapes of a subschema."""
        if isinstance(node, bool):
            return [Shape()] if node else []
        if not depth:
            raise refuse(path, "nests too many combinations of schemas")
        if "object" not in own_kinds(node):
            return []
        if allowed(node) is not None:
            raise refuse(path, "lists whole objects, which cannot be enforced in a call in tags")
        if "oneOf" in node:
            raise refuse(f"{path}/oneOf", "has alternatives that may overlap; use anyOf")
        choices = [[_own(node)]]
        if "$ref" in node:
            choices.append(self._definition(node["$ref"].rsplit("/", 1)[-1], path, depth - 1))
        for part in node.get("allOf", ()):
            choices.append(self.of(part, f"{path}/allOf", depth - 1))
        if "anyOf" in node:
            parts = [self.of(part, f"{path}/anyOf", depth - 1) for part in node["anyOf"]]
            choices.append([shape for shapes in parts for shape in shapes])
        if math.prod(map(len, choices)) > _MOST:
            raise refuse(path, "nests too many combinations of schemas")
        return [reduce(Shape.joined, each) for each in product(*choices)]

    def _definition(self, name: str, path: str, depth: int) -> list[Shape]:
        if name not in self._known:
            self._known[name] = []  # a definition that is itself has no shape
            self._known[name] = self.of(self._definitions[name], path, depth)
        return self._known[name]


def _own(node: Mapping[str, Any]) -> Shape:
    """Return the shape of a schema without its combinations."""
    layer = {name: node[name] for name in _LAYER if name in node}
    required, least = frozenset(node.get("required", ())), node.get("minProperties", 0)
    return Shape((layer,) if layer else (), required, least, node.get("maxProperties"))


def _parts(layer: Mapping[str, Any], name: str, matches: Matches) -> list[Any]:
    """Return the schemas that a layer has for a property."""
    properties = layer.get("properties", {})
    parts = [properties[name]] if name in properties else []
    patterns = layer.get("patternProperties", {})
    parts += [schema for each, schema in patterns.items() if matches(each, name)]
    return parts or [layer.get("additionalProperties", True)]


def _all(parts: list[Any]) -> Any:
    """Return the schema of values that fit all parts."""
    kept = [part for part in parts if part is not True]
    if any(part is False for part in kept):
        return False
    return True if not kept else kept[0] if len(kept) == 1 else {"allOf": kept}
