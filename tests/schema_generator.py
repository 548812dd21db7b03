"""Random JSON schemas: keywords in combinations, as clients and their libraries write them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

PATTERNS = (
    "^[a-z]+$", "^[a-z]*$", "[0-9]{2}", r"^\d{4}-\d{2}$", "^a|b$", "^(foo|bar)", r"^\w+\.py$",
    "^[^/]+$", r"^#[0-9a-fA-F]{6}$", r"\S", "^$", ".", r"^\S+@\S+$", "^(?:[A-Z]{2}-)?[0-9]+$", "x$",
    r"^[\w-]{1,8}$", r"^[^\d]+$",
)  # fmt: skip
LOOKING = ("^(?=.*[0-9])[a-z0-9]+$", "^(?!no)[a-z]+$", r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$")
FORMATS = (
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    "uri-reference", "json-pointer", "int32", "binary", "regex", "my-own",
)  # fmt: skip
WORDS = ("a", "bc", "def", "Zürich", "北京", 'q"q', "x y", "line\nbreak", "")
NAMES = ("a", "b", "c", "kind", "first name", "ü", "a_b")
VALUES: tuple[Any, ...] = (*WORDS, 0, 1, -3, 2.5, 100, True, False, None, [1], {"a": 1}, [], {})


class SchemaGenerator:
    """Draws schemas from one seed.

    Args:
        random: where the choices come from.
    """

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self._names: list[str] = []

    def schema(self) -> dict[str, Any]:
        """Draw a whole schema, sometimes with definitions that it may refer to."""
        kinds = [*[self._object] * 3, self._any, self._any]
        return self._whole(lambda: self._with_others(self._pick(*kinds)(3), 3))

    def parameters(self) -> dict[str, Any]:
        """Draw the schema of a function's parameters."""
        kinds = [*[self._object] * 7, self._discriminated, self._objects, self._definition]
        return self._whole(lambda: self._pick(*kinds)(2))

    def _objects(self, depth: int) -> dict[str, Any]:
        parts = [self._object(depth) for _ in range(self._random.randrange(1, 3))]
        return {"type": "object", self._pick("anyOf", "allOf"): parts}

    def _definition(self, depth: int) -> dict[str, Any]:
        self._names.append("P")
        return {"$ref": "#/$defs/P", "$defs": {"P": self._object(depth)}}

    def _whole(self, draw: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self._names = [f"D{i}" for i in range(self._random.choice((0, 0, 1, 2)))]
        schema = draw()
        if self._names:
            own = schema.pop("$defs", {})
            schema = {"$defs": {name: self._sub(2) for name in self._names} | own, **schema}
        if self._chance(0.05):
            schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
        return schema

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _pick(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def _sub(self, depth: int) -> Any:
        """Draw a schema at a depth; at 0 without children."""
        if self._chance(0.03):
            return self._pick(True, {}, {"description": "anything"})
        if self._names and self._chance(0.12):
            return self._reference(depth)
        return self._with_others(self._any(depth), depth)

    def _any(self, depth: int) -> dict[str, Any]:
        kinds: list[Callable[[int], dict[str, Any]]]
        kinds = [self._string, self._string, self._integer, self._number, self._enum, self._types]
        if depth > 0:
            kinds += [self._object, self._object, self._array, self._union, self._union]
        schema: dict[str, Any] = self._random.choice(kinds)(depth)
        if self._chance(0.2):
            schema = schema | {"description": "What it is.", "title": "T"}
        return schema

    def _reference(self, depth: int) -> dict[str, Any]:
        schema = {"$ref": f"#/$defs/{self._random.choice(self._names)}"}
        return schema | self._any(depth - 1) if depth and self._chance(0.2) else schema

    def _string(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        if self._chance(0.2):
            schema["pattern"] = self._random.choice(PATTERNS if self._chance(0.9) else LOOKING)
        if self._chance(0.1):
            schema["format"] = self._random.choice(FORMATS)
        return schema | self._lengths("Length", 0.15)

    def _lengths(self, what: str, share: float) -> dict[str, Any]:
        low = self._random.randrange(4)
        given = {f"min{what}": low, f"max{what}": low + self._random.randrange(6)}
        return {name: value for name, value in given.items() if self._chance(share)}

    def _integer(self, depth: int) -> dict[str, Any]:
        return {"type": "integer"} | self._bounds(lambda: self._random.randrange(-20, 120), 5)

    def _number(self, depth: int) -> dict[str, Any]:
        bound = lambda: self._random.choice((0, 1, -2.5, 0.5, 10, 100))  # noqa: E731
        return {"type": "number"} | self._bounds(bound, 0.5)

    def _bounds(self, bound: Callable[[], float], step: float) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        if self._chance(0.35):
            schema[self._pick("minimum", "minimum", "exclusiveMinimum")] = bound()
        if self._chance(0.35):
            low = max([0, *schema.values()])
            schema[self._pick("maximum", "maximum", "exclusiveMaximum")] = low + abs(bound())
        if self._chance(0.05):
            schema["multipleOf"] = step
        return schema

    def _enum(self, depth: int) -> dict[str, Any]:
        if self._chance(0.3):
            return {"const": self._random.choice(VALUES)}
        values = VALUES if self._chance(0.3) else WORDS
        schema: dict[str, Any] = {"enum": self._random.sample(values, self._random.randrange(1, 4))}
        if values is WORDS and self._chance(0.6):
            schema = {"type": "string", **schema}
        return schema | (self._lengths("Length", 0.5) if self._chance(0.1) else {})

    def _types(self, depth: int) -> dict[str, Any]:
        if self._chance(0.5):
            return {"type": self._pick("boolean", "null")}
        kinds = self._random.sample(("string", "null", "integer", "boolean", "number"), 2)
        schema: dict[str, Any] = {"type": kinds}
        if self._chance(0.3):
            schema |= self._bounds(lambda: self._random.randrange(9), 2)
        return schema | self._lengths("Length", 0.1)

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(NAMES, self._random.randrange(4))
        schema: dict[str, Any] = {"type": "object"}
        if names or self._chance(0.5):
            schema["properties"] = {name: self._sub(depth - 1) for name in names}
        needed = [name for name in names if self._chance(0.6)]
        if self._chance(0.06):
            needed.append(self._random.choice(NAMES))
        if needed:
            schema["required"] = list(dict.fromkeys(needed))
        if self._chance(0.25):
            schema["additionalProperties"] = self._pick(False, False, True, self._sub(depth - 1))
        if self._chance(0.05):
            schema["patternProperties"] = {self._pick("^x_", "^[0-9]+$"): self._sub(depth - 1)}
        if self._chance(0.04):
            schema |= self._lengths("Properties", 0.5)
        if self._chance(0.01):
            schema["propertyNames"] = self._pick(
                {"type": "string"}, {"pattern": "^[a-z]+$"}, {"enum": ["a", "k"]}, {"maxLength": 3}
            )
        if self._chance(0.02):
            schema["dependentRequired"] = {"a": ["b"]}
        if self._chance(0.03):
            schema["unevaluatedProperties"] = False
        if self._chance(0.04):
            schema[self._pick("properties", "required", "additionalProperties")] = None
        if self._chance(0.1):
            del schema["type"]
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array"}
        if self._chance(0.85):
            schema["items"] = self._sub(depth - 1)
        if self._chance(0.15):
            tuple_items = [self._sub(depth - 1) for _ in range(self._random.randrange(1, 3))]
            if self._chance(0.5):
                schema["prefixItems"] = tuple_items
            else:
                schema["items"] = tuple_items
                if self._chance(0.5):
                    schema["additionalItems"] = self._pick(False, self._sub(depth - 1))
        if self._chance(0.02):
            schema["uniqueItems"] = True
        return schema | self._lengths("Items", 0.3)

    def _union(self, depth: int) -> dict[str, Any]:
        keyword = self._pick("anyOf", "anyOf", "anyOf", "oneOf", "allOf")
        if keyword == "oneOf" and self._chance(0.6):
            return self._discriminated(depth)
        count = self._random.randrange(1, 4 if keyword != "allOf" else 3)
        return {keyword: [self._sub(depth - 1) for _ in range(count)]}

    def _discriminated(self, depth: int) -> dict[str, Any]:
        """Draw a union as pydantic and zod write them: a property tells its branches apart."""
        branches = []
        for kind in self._random.sample(WORDS, self._random.randrange(2, 4)):
            branch = self._object(depth)
            properties = {
                "kind": {"const": kind, "default": kind},
                **(branch.get("properties") or {}),
            }
            properties["kind"] = {"const": kind, "default": kind}
            branch |= {"properties": properties}
            if self._chance(0.5):
                branch["required"] = list(
                    {"kind": 0, **dict.fromkeys(branch.get("required") or ())}
                )
            branches.append(branch)
        return {"oneOf": branches, "discriminator": {"propertyName": "kind"}}

    def _with_others(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """Perhaps add keywords beside those of a schema, or a form of an older draft."""
        if self._chance(0.03) and depth > 0:
            schema = schema | self._pick(self._union, self._union, self._object, self._array)(
                depth - 1
            )
        if self._chance(0.04):
            schema = schema | self._pick(
                {"nullable": True}, {"default": None}, {"x-order": 1}, {"deprecated": False},
                {"$comment": "none"}, {"examples": [1]}, {"not": {}}, {"not": {"type": "null"}},
            )  # fmt: skip
        if self._chance(0.02):
            schema = schema | {"minimum": 3, "exclusiveMinimum": self._chance(0.5)}
        if self._chance(0.005):
            schema = schema | self._pick(
                {"if": {"type": "string"}, "then": {"minLength": 2}}, {"contains": {"const": 1}},
                {"dependentSchemas": {"a": {"required": ["b"]}}}, {"not": {"required": ["a"]}},
            )  # fmt: skip
        return schema
