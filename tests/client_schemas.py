"""JSON schemas as real tools and libraries write them; every one of them can be enforced."""

from __future__ import annotations

from typing import Any

TEXT = {"type": "string"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
CAT = {
    "type": "object",
    "properties": {
        "kind": {"const": "cat", "default": "cat", "type": "string"},
        "lives": {"type": "integer"},
    },
    "required": ["lives"],
}
DOG = {
    "type": "object",
    "properties": {
        "kind": {"const": "dog", "default": "dog", "type": "string"},
        "barks": {"type": "boolean"},
    },
    "required": ["barks"],
}


def thing(required: tuple[str, ...] = (), /, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object."""
    return {"type": "object", "properties": properties, "required": list(required)}


SCHEMAS: dict[str, dict[str, Any]] = {
    "read a file": thing(("path",), path=TEXT, offset={"type": "integer", "minimum": 0}),
    "edit a file": thing(("path", "old", "new"), path=TEXT, old=TEXT, new=TEXT,
                         replace_all={"type": "boolean", "default": False}),
    "several edits": {
        "$schema": DRAFT_7, "additionalProperties": False,
        **thing(("path", "edits"), path=TEXT, edits={
            "type": "array", "minItems": 1,
            "items": {**thing(("oldText", "newText"), oldText=TEXT, newText=TEXT),
                      "additionalProperties": False}}),
    },
    "shell": thing(("command",), command={"type": "array", "items": TEXT},
                   timeout={"type": "number", "exclusiveMinimum": 0, "maximum": 600000}),
    "to do": thing(("todos",), todos={"type": "array", "items": thing(
        ("content", "status"), content={"type": "string", "minLength": 1},
        status={"type": "string", "enum": ["pending", "in_progress", "completed"]})}),
    "github issue": thing(("owner", "repo", "title"), owner=TEXT, repo=TEXT, title=TEXT, body=TEXT,
                          labels={"type": "array", "items": TEXT},
                          milestone={"anyOf": [{"type": "number"}, {"type": "null"}]}),
    "github search": thing(("query",), query=TEXT, order={"enum": ["asc", "desc"]},
                           perPage={"type": "number", "minimum": 1, "maximum": 100}),
    "browser": thing(("url",), url={"type": "string", "format": "uri"},
                     viewport=thing(("width",), width={"type": "integer"})),
    "coordinates": thing(("at",), at={"type": "array", "items": {"type": "integer"},
                                      "minItems": 2, "maxItems": 2}),
    "no parameters": {"type": "object", "properties": {}},
    "null keywords": {"type": "object", "properties": None, "required": None},
    "zod record": thing(("env",), env={"type": "object", "propertyNames": {"type": "string"},
                                      "additionalProperties": TEXT}),
    "zod int": thing(("n",), n={"type": "integer", "minimum": -9007199254740991,
                               "maximum": 9007199254740991}),
    "zod never": thing(("a",), a=TEXT, b={"not": {}}),
    "zod intersection": {"allOf": [thing(("a",), a=TEXT), thing(("b",), b={"type": "number"})]},
    "schemars int64": thing(("n",), n={"type": "integer", "format": "int64",
                                      "minimum": -9223372036854775808,
                                      "maximum": 9223372036854775807}),
    "pydantic optional": thing((), name={"anyOf": [TEXT, {"type": "null"}], "default": None}),
    "pydantic constr": thing(("s",), s={"type": "string", "minLength": 2, "maxLength": 5,
                                       "pattern": "^[a-z]+$"}),
    "pydantic conlist": thing(("l",),
                                l={"type": "array", "items": {"type": "integer", "multipleOf": 5},
                                        "minItems": 1, "maxItems": 3}),
    "pydantic Decimal": thing(("d",), d={"anyOf": [
        {"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}),
    "pydantic datetime": thing(("at", "day"), at={"type": "string", "format": "date-time"},
                               day={"type": "string", "format": "date"},
                               id={"type": "string", "format": "uuid"}),
    "pydantic tuple": thing(("t",), t={"type": "array", "maxItems": 2, "minItems": 2,
                                      "prefixItems": [{"type": "integer"}, TEXT]}),
    "pydantic dict of enum": thing(("d",), d={
        "type": "object", "propertyNames": {"enum": ["x", "y"]},
        "additionalProperties": {"type": "integer"}}),
    "pydantic $ref with description": {
        "$defs": {"E": {"enum": ["x", "y"], "type": "string"}},
        **thing(("e",), e={"$ref": "#/$defs/E", "description": "d", "default": "x"})},
    "pydantic allOf of a $ref": {
        "definitions": {"E": {"enum": ["x", "y"]}},
        **thing(("e",), e={"allOf": [{"$ref": "#/definitions/E"}], "title": "E"})},
    "pydantic discriminator": {
        "$defs": {"Cat": CAT, "Dog": DOG},
        **thing(("pet",), pet={
            "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
                              "propertyName": "kind"},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]})},
    "pydantic recursion": {
        "$defs": {"Node": thing(("value",), value={"type": "integer"}, children={
            "type": "array", "items": {"$ref": "#/$defs/Node"}, "default": []})},
        "$ref": "#/$defs/Node"},
    "pydantic JSON value": thing(("v",), v={"title": "V"}),
    "TypeBox recursion": {"$id": "T0", **thing(("id",), id=TEXT, nodes={
        "type": "array", "items": {"$ref": "T0"}})},
    "draft 4": {"$schema": "http://json-schema.org/draft-04/schema#",
                **thing(("n", "t"), n={"type": "integer", "minimum": 3, "exclusiveMinimum": True},
                        t={"type": "array", "items": [{"type": "integer"}, TEXT],
                           "additionalItems": False})},
    "float bounds": thing(("n",), n={"type": "integer", "minimum": 0.5, "maximum": 9.5}),
    "exactly one of": {**thing((), a=TEXT, b=TEXT),
                       "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "at least one of": {**thing((), a=TEXT, b=TEXT),
                        "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "required without a property": thing(("a", "b"), a=TEXT),
    "dependent": {**thing((), a=TEXT, b=TEXT), "dependentRequired": {"a": ["b"]}},
    "format and length": thing(("m",), m={"type": "string", "format": "email", "maxLength": 12}),
    "enum and length": thing(("e",), e={"enum": ["a", "abc"], "minLength": 2}),
    "unicode": thing(("ü>",), **{"ü>": {"enum": ["北京", "Zürich", 'a"b', "line\nbreak"]}}),
    "OpenAPI": thing(("n",), n={"type": "string", "nullable": True, "example": "x"}),
    "unevaluated": {**thing(("a",), a=TEXT), "unevaluatedProperties": False},
}  # fmt: skip
