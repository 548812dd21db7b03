"""All known keywords of JSON schemas, and who enforces them."""

from __future__ import annotations

PLAIN = (
    "type", "enum", "const", "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "maxProperties",
)  # fmt: skip
"""Keywords whose values contain no schemas, and which llguidance takes as they are."""
ENFORCED = frozenset(
    [
        *PLAIN, "allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems",
        "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "properties",
        "patternProperties", "$ref", "not", "required", "minProperties", "propertyNames",
        "dependentRequired", "dependencies", "pattern", "format",
    ]
)  # fmt: skip
"""Keywords that llguidance enforces, if need be in other words."""
UNENFORCED = frozenset(
    [
        "if", "dependentSchemas", "uniqueItems", "contains", "$dynamicRef", "$recursiveRef",
        "contentSchema", "extends", "disallow", "divisibleBy",
    ]
)  # fmt: skip
"""Keywords that no grammar enforces."""
NOTES = frozenset(
    [
        "title", "description", "default", "examples", "example", "deprecated", "readOnly", "then",
        "else", "writeOnly", "nullable", "discriminator", "minContains", "maxContains", "$defs",
        "definitions", "$schema", "$id", "id", "$anchor", "$comment", "$vocabulary", "strict",
        "contentEncoding", "contentMediaType",
    ]
)  # fmt: skip
"""Keywords that restrict nothing by themselves."""
KNOWN = ENFORCED | UNENFORCED | NOTES
_NUMBER = frozenset(
    ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
)  # fmt: skip
KEYWORDS_OF = {
    "string": frozenset(["minLength", "maxLength", "pattern"]),
    "integer": _NUMBER,
    "number": _NUMBER,
    "array": frozenset(["items", "prefixItems", "minItems", "maxItems"]),
    "object": frozenset(
        ["properties", "patternProperties", "additionalProperties", "required", "minProperties",
         "maxProperties"]
    ),
}  # fmt: skip
"""The keywords of a rewritten schema that restrict the values of one kind."""
