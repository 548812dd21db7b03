"""Refuses JSON schemas in structural tags and calls that xgrammar cannot enforce.

Ignoring a keyword would allow answers that break the schema, and an error is better than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vlm_serve.errors import InvalidRequestError

MAX_SCHEMA_NODES = 4096

# Constraints that a grammar cannot express, or that xgrammar ignores.
UNENFORCED = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "multipleOf",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "propertyNames",
        "$dynamicRef",
        "$recursiveRef",
        "contentSchema",
        "extends",
        "disallow",
        "divisibleBy",
    ]
)
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems")
_KNOWN = frozenset(
    [
        "type",
        "enum",
        "const",
        "$ref",
        "required",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minItems",
        "maxItems",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "minProperties",
        "maxProperties",
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "nullable",
        "discriminator",
        "additionalItems",
        "$schema",
        "$id",
        "id",
        "$anchor",
        "$comment",
        "$vocabulary",
        "contentEncoding",
        "contentMediaType",
        "strict",
    ]
).union(_NAMED, _LISTED, _SINGLE)


def check_schema(schema: Any, name: str, *, strict: bool = False) -> None:
    """Check a schema of bounded depth.

    Args:
        schema: parsed JSON.
        name: the request field, for the error.
        strict: also refuse unknown keywords.

    Raises InvalidRequestError that names the keyword.
    """
    open_nodes, count = [schema], 0
    while open_nodes:
        node = open_nodes.pop()
        if not isinstance(node, Mapping):
            continue
        count += 1
        if count > MAX_SCHEMA_NODES:
            raise _refuse(name, f"has more than {MAX_SCHEMA_NODES} subschemas")
        for keyword, value in node.items():
            if keyword in UNENFORCED and value is not False:
                raise _refuse(name, f"uses {keyword!r}, which cannot be enforced")
            if strict and keyword not in _KNOWN:
                raise _refuse(name, f"uses the unknown keyword {str(keyword)[:64]!r}")
            if keyword == "$ref" and not str(value).startswith("#"):
                raise _refuse(name, "has a $ref to another document; only '#...' is supported")
            if keyword == "allOf" and isinstance(value, list) and len(value) > 1:
                raise _refuse(name, "uses 'allOf' with several schemas, which cannot be enforced")
        open_nodes.extend(_children(node))


def _children(node: Mapping[str, Any]) -> Iterator[Any]:
    for keyword in _NAMED:
        if isinstance(node.get(keyword), Mapping):
            yield from node[keyword].values()
    for keyword in _LISTED:
        if isinstance(node.get(keyword), list):
            yield from node[keyword]
    for keyword in _SINGLE:
        yield node.get(keyword)


def _refuse(name: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"the JSON schema {what}", param=name)
