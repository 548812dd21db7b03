"""Keywords of JSON schemas in the forms that llguidance enforces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vlm_serve.grammar import searching
from vlm_serve.grammar.references import refuse

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

# The format `regex`: expressions that Python, JavaScript and Rust all take. Groups nest, which no
# pattern can follow to any depth, so their depth is limited. Left out are references, names of
# groups, and what looks ahead or behind: engines differ about them.
_DEPTH = 3
_PLAIN = r"[^\[\](){}.*+?^$|\\\x00-\x1f\x7f]"
_ESCAPED = r"\\(?:[dDwWsSnrtfv]|[\[\](){}.*+?^$|\\/])"
_IN_CLASS = rf"(?:[^\[\]&~|^\\\-\x00-\x1f\x7f]|{_ESCAPED}|\\-)"
_RANGE = "(?:a-z|A-Z|0-9|a-f|A-F)"
_CLASS = rf"\[\^?-?(?:{_RANGE}|{_IN_CLASS})+-?\]"
_COUNT = r"\{(?:[0-9]{1,3},?|[01],[1-9][0-9]{0,2})\}"
_QUANTIFIER = rf"(?:(?:[*+?]|{_COUNT})\??)?"
_ANCHOR = r"[\^$]|\\[bB]"


def _nested(depth: int) -> str:
    """Return the pattern of an expression with groups to a depth."""
    atoms = [_PLAIN, _ESCAPED, r"\.", _CLASS]
    if depth:
        atoms.append(rf"\((?:\?:)?{_nested(depth - 1)}\)")
    return rf"(?:(?:{'|'.join(atoms)}){_QUANTIFIER}|{_ANCHOR}|\|)*"


REGEX = f"^{_nested(_DEPTH)}$"

_DATE = (
    r"(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_CHARACTER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HEX = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        f"(?:{_HEX}:){{7}}{_HEX}",
        f"(?:{_HEX}:){{1,7}}:",
        *(f"(?:{_HEX}:){{1,{7 - count}}}(?::{_HEX}){{1,{count}}}" for count in range(1, 7)),
        f":(?::{_HEX}){{1,7}}",
        "::",
    ]
)
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DAYS = r"[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?"
_HOURS = r"T(?:[0-9]+S|[0-9]+M(?:[0-9]+S)?|[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?)"
FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": rf"^P(?:[0-9]+W|(?:{_DAYS})(?:{_HOURS})?|{_HOURS})$",
    "email": r"^[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9]+(?:-+[A-Za-z0-9]+)*"
    r"(?:\.[A-Za-z0-9]+(?:-+[A-Za-z0-9]+)*)+$",
    "hostname": rf"^(?:{_LABEL}\.){{0,8}}[A-Za-z](?:[A-Za-z0-9-]{{0,61}}[A-Za-z0-9])?$",
    "ipv4": rf"^(?:{_OCTET}\.){{3}}{_OCTET}$",
    "ipv6": f"^(?:{_IPV6})$",
    "uuid": "^[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$",
    "uri": rf"^[A-Za-z][A-Za-z0-9+.-]*:(?://(?:{_LABEL}\.){{0,8}}{_LABEL}(?::[0-9]{{1,4}})?"
    rf"(?:/{_CHARACTER}*)*|//(?:/{_CHARACTER}+)+|{_CHARACTER}+(?:/{_CHARACTER}+)*)"
    rf"(?:\?(?:{_CHARACTER}|[/?])*)?(?:#(?:{_CHARACTER}|[/?])*)?$",
    "uri-reference": f"^(?:{_CHARACTER}|[/?])*(?:#(?:{_CHARACTER}|[/?])*)?$",
    "json-pointer": r"^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": r"^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
    "regex": REGEX,
}
"""Patterns of the formats. Other formats are annotations, as the standard has them."""
_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
_DIGITS = r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)$"
_EXACT = 1 << 53
_LONGEST_EMAIL = 254
_MOST_REPETITIONS = (1 << 31) - 1
_KINDS = ("string", "number", "boolean", "null", "array", "object")


def pattern(text: Any, path: str) -> str:
    """Return a pattern in llguidance's syntax.

    Raises:
        InvalidRequestError: it is no text, or looks ahead or behind.
    """
    if not isinstance(text, str):
        raise refuse(path, "must be a text")
    if text == _DECIMAL:  # pydantic's Decimal: it means that there is a digit
        return _DIGITS
    if any(mark in text for mark in ("(?=", "(?!", "(?<=", "(?<!")):
        raise refuse(path, "looks ahead or behind, which cannot be enforced")
    return text


def lengths(given: dict[str, Any], path: str) -> None:
    """Write lengths as whole numbers, without those out of reach of any answer.

    Raises:
        InvalidRequestError: so long a text is demanded.
    """
    for name in ("minLength", "maxLength"):
        value = given.get(name)
        if isinstance(value, float) and value.is_integer():
            given[name] = value = int(value)
        if isinstance(value, int) and value > _MOST_REPETITIONS:
            del given[name]
            if name == "minLength":
                raise refuse(f"{path}/{name}", "is more than any answer has")


def length_pattern(given: Mapping[str, Any], text: str) -> str | None:
    """Return a pattern of the lengths in a schema, for texts of another pattern; None: no such one.

    llguidance searches for a fitting text in JSON. With characters of several bytes it gives up
    on lengths from about 100, so lengths of ASCII are repetitions of its characters.
    Beyond 254 it gives up on these as well, but no address of mail is longer.
    """
    least, most = given.get("minLength", 0), given.get("maxLength")
    if text == FORMATS["email"] and isinstance(most, int):
        most = min(most, _LONGEST_EMAIL)
    if most is None and not least or not searching.is_ascii(text):
        return None
    if not isinstance(least, int) or not isinstance(most, int | None):
        return None
    if least < 0 or (most is not None and most < least):
        return None
    return f"^[\\x00-\\x7f]{{{least},{'' if most is None else most}}}$"


def bounds(given: dict[str, Any]) -> None:
    """Write draft 4's bounds as later ones, and those beyond exact doubles as narrower ones."""
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        value = given.get(exclusive)
        if isinstance(value, bool):
            del given[exclusive]
            if value and bound in given:
                given[exclusive] = given.pop(bound)
    for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        value = given.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > _EXACT:
            low = name in ("minimum", "exclusiveMinimum")
            if (value < 0) == low:
                given[name] = math.copysign(_EXACT, value)
    kinds = given.get("type")
    if kinds != "integer":
        _narrow(given)
    else:
        for name, rounded in (("minimum", math.ceil), ("maximum", math.floor)):
            if isinstance(given.get(name), float):
                given[name] = rounded(given[name])


def _narrow(given: dict[str, Any]) -> None:
    """Write exclusive bounds of a narrow range as inclusive ones, a thousandth of it further in.

    In a range inside one whole number, llguidance 1.9 allows that number itself.
    """
    low = given.get("exclusiveMinimum", given.get("minimum"))
    high = given.get("exclusiveMaximum", given.get("maximum"))
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return
    if not 0 < high - low <= 1:
        return
    step = 10.0 ** math.floor(math.log10(high - low) - 3)
    digits = max(0, -math.floor(math.log10(step))) + 1
    for exclusive, bound, moved, sharper in (
        ("exclusiveMinimum", "minimum", low + step, max),
        ("exclusiveMaximum", "maximum", high - step, min),
    ):
        if exclusive in given:
            del given[exclusive]
            given[bound] = sharper(round(moved, digits), given.get(bound, moved))


def negated(value: Any, path: str) -> Any:
    """Return what `not` means where it is a type, a required property, or everything.

    Raises:
        InvalidRequestError: it is anything else.
    """
    if value in (True, {}):
        return False
    if value is False:
        return True
    if isinstance(value, Mapping) and len(value) == 1:
        kinds, required = value.get("type"), value.get("required")
        listed = [kinds] if isinstance(kinds, str) else kinds
        if isinstance(listed, list) and "integer" not in listed:
            return {"type": [kind for kind in _KINDS if kind not in listed]}
        if isinstance(required, list) and len(required) == 1:
            return {"type": "object", "properties": {required[0]: False}}
    raise refuse(path, "cannot be enforced: only a type or a single required property can")


def property_names(given: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the keywords that say what `propertyNames` does.

    Raises:
        InvalidRequestError: none do.
    """
    rule = given.get("propertyNames")
    if not isinstance(rule, Mapping):
        return {"additionalProperties": False, "properties": {}} if rule is False else {}
    where = f"{path}/propertyNames"
    rule = {name: value for name, value in rule.items() if name not in NOTES}
    if rule.get("type") == "string":
        rule.pop("type")
    if not rule:
        return {}
    if len(rule) > 1 or given.get("patternProperties"):
        raise refuse(where, "cannot be enforced beside other rules for names")
    others = given.get("additionalProperties", True)
    known = given.get("properties") or {}
    allowed = [rule["const"]] if "const" in rule else rule.get("enum")
    if isinstance(allowed, list):
        named = {name: others for name in allowed if isinstance(name, str)}
        kept = {name: value for name, value in known.items() if name in named}
        return {"properties": {**named, **kept}, "additionalProperties": False}
    if "pattern" in rule and not known:
        return {"patternProperties": {rule["pattern"]: others}, "additionalProperties": False}
    raise refuse(where, "can be enforced only as a list of names, or a pattern for all names")
