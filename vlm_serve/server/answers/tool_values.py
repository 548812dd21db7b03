"""Converting the text of a tool call's parameter to a value of its schema.

A line break on either side of the text belongs to the form. Models also write other white space
there around a restricted value. So a text has several readings: the plain one is tried first, then
those with the most white space removed. A value that a grammar enforces has one reading.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vlm_serve.grammar.kinds import Kinds, allowed, is_of, kind_of
from vlm_serve.grammar.references import at_pointer, listed
from vlm_serve.preprocess.reading.values import begins_json

_SPACE = (" ", "\n", "\r", "\t")
_BLANK = r"(?: |\\[nrst]|\[(?: |\\[nrst])+\])"
_BLANK_FIRST = re.compile(rf"\^?(?:\((?:\?:)?)*{_BLANK}(?![?*]|\{{0)")
_BLANK_LAST = re.compile(rf"(?<!\\){_BLANK}(?:\+|\{{[1-9]\d*(?:,\d*)?\}})?\)*\$?$")
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")


def read(
    text: str, schema: Any, root: Mapping[str, Any] | None = None, *, exact: str | None = None
) -> Any:
    """Return the value of the first reading that satisfies the schema, preferring JSON to text.

    If none does, the plain reading becomes JSON, a literal of Python or text, as the schema's types
    suggest.

    Args:
        text: the text between the tags.
        schema: the parameter's schema.
        root: the schema of all parameters, in which `$ref` is resolved.
        exact: the only reading of the text, if the form leaves no doubt.
    """
    plain = unframed(text) if exact is None else exact
    leaves = list(_alternatives(schema, root or {}))
    for reading in (plain, *_readings(text)) if exact is None else (plain,):
        for value_of in (_json_value, _text_value):
            for leaf in leaves:
                for value in value_of(reading, leaf):
                    return value
    if any("string" in _kinds(leaf) for leaf in leaves):
        return plain
    for value in _json_value(plain, {}):
        return value
    kinds = {kind for leaf in leaves for kind in _kinds(leaf)}
    value = _python_value(plain) if kinds & {"array", "object"} else None
    return plain if value is None or not is_of(value, kinds) else value


def enforced_json(text: str, kinds: Kinds) -> str:
    """Return the JSON of a value that a grammar enforces.

    Args:
        text: the value, without the form's line breaks.
        kinds: the kinds of values that its schema may accept.
    """
    if text == text.strip() and not is_enforced_text(text, kinds):
        try:
            value = strict_json(text, bounded=True)
        except (ValueError, RecursionError):
            return as_json(text)
        kind = kind_of(value)
        if "string" not in kinds or (kind in kinds and kind != "string"):
            return as_json(value)
    return as_json(text)


def is_enforced_text(start: str, kinds: Kinds) -> bool:
    """Return True if an enforced value is a string for certain, by its first characters."""
    if "string" not in kinds:
        return False
    return len(kinds) == 1 or start != start.lstrip() or not begins_json(start)


def unframed(text: str) -> str:
    """Return a value without the form's line breaks on either side of it."""
    end = "\r\n" if text.startswith("\r\n") else "\n"
    return text.removeprefix(end).removesuffix(end)


def is_no_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Return True if the schema names types and none of them is string."""
    kinds = [_kinds(leaf) for leaf in _alternatives(schema, root)]
    return all(names and "string" not in names for names in kinds)


def is_plain_text(schema: Any, root: Mapping[str, Any], start: str, length: int) -> bool:
    """Return True if a value is its plain text, whatever follows its start.

    Args:
        start: its first characters, without white space around them.
        length: a length that the value reaches.
    """
    leaves = list(_alternatives(schema, root))
    texts = [leaf for leaf in leaves if "string" in (_kinds(leaf) or ("string",))]
    if not any(_takes_text(leaf, length) for leaf in texts):
        return False
    only = all(_kinds(leaf) == ("string",) for leaf in leaves)
    return only or not (begins_json(start) or start.lower().startswith(("null", "none")))


def _takes_text(leaf: Mapping[str, Any], length: int) -> bool:
    """Return True if any text of this length or longer satisfies the schema."""
    shortest = leaf.get("minLength", 0)
    restricted = leaf.keys() & {"const", "enum", "maxLength", "pattern", "format"}
    return not restricted and isinstance(shortest, int) and shortest <= length


def _readings(text: str) -> Iterator[str]:
    """Yield the text without white space at its edges, the shortest first."""
    for start in [text[1:], text] if text.startswith(_SPACE) else [text]:
        yield from [start[:-1], start] if start.endswith(_SPACE) else [start]


def _alternatives(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the alternatives of a schema, with $ref and combinations resolved."""
    followed: set[str] = set()
    open_schemas = [schema]
    while open_schemas:
        node = open_schemas.pop(0)
        if not isinstance(node, Mapping):
            yield {}
            continue
        rest = {name: value for name, value in node.items() if name not in _COMBINED}
        reference = node.get("$ref")
        if isinstance(reference, str):
            if reference not in followed:  # avoid cycles
                followed.add(reference)
                open_schemas.append(_merged(rest, at_pointer(root, reference)))
        elif node.get("allOf"):
            whole: Any = {**rest, **{name: node[name] for name in _COMBINED[2:] if name in node}}
            for part in listed(node, "allOf"):
                whole = _merged(whole, part)
            open_schemas.append(whole)
        elif parts := listed(node, "anyOf") or listed(node, "oneOf"):
            open_schemas += [_merged(rest, part) for part in parts]
        else:
            yield rest


def _merged(outer: Mapping[str, Any], inner: Any) -> Mapping[str, Any]:
    return {**outer, **inner} if isinstance(inner, Mapping) else outer


def _kinds(leaf: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = leaf.get("type")
    return (kinds,) if isinstance(kinds, str) else tuple(listed(leaf, "type"))


def _json_value(text: str, leaf: Mapping[str, Any]) -> list[Any]:
    """Return [value of the text as JSON] if it satisfies the schema, else []."""
    kinds = _kinds(leaf)
    if kinds == ("string",):
        return []
    try:
        value = strict_json(text)
    except (ValueError, RecursionError):
        word = text.strip().lower()
        if "boolean" in kinds and word in ("true", "false"):
            value = word == "true"
        elif "null" in kinds and word in ("none", "null"):
            value = None
        else:
            return []
    if kinds and (isinstance(value, str) or not is_of(value, kinds)):
        return []
    values = allowed(leaf)
    return [value] if values is None or any(_same(value, choice) for choice in values) else []


_LITERAL = re.compile(
    r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|\b(True|False|None)\b""", re.DOTALL
)
_IN_LITERAL = re.compile(r"""\\(x[0-9a-fA-F]{2}|.)|\"""", re.DOTALL)
_WORDS = {"True": "true", "False": "false", "None": "null"}


def _python_value(text: str) -> Any:
    """Return the value of a list or dict as Python writes it; None: the text is none."""

    def as_text(match: re.Match[str]) -> str:
        if match.group(3):
            return _WORDS[match.group(3)]
        inner = match.group(1) if match.group(2) is None else match.group(2)
        return f'"{_IN_LITERAL.sub(_json_escape, inner)}"'

    try:
        return strict_json(_LITERAL.sub(as_text, text), lenient=True)
    except (ValueError, RecursionError):
        return None


def _json_escape(match: re.Match[str]) -> str:
    """Return a character of a Python text as JSON writes it."""
    sign = match.group(1)
    if sign is None:
        return '\\"'
    return "'" if sign == "'" else f"\\u00{sign[1:]}" if len(sign) == 3 else match.group()


def _text_value(text: str, leaf: Mapping[str, Any]) -> list[str]:
    """Return [text] if it satisfies the schema, else []."""
    kinds, values = _kinds(leaf), allowed(leaf)
    if kinds and "string" not in kinds:
        return []
    if values is not None:
        return [text] if text in values else []
    shortest, longest = leaf.get("minLength"), leaf.get("maxLength")
    if isinstance(shortest, int) and len(text) < shortest:
        return []
    if isinstance(longest, int) and len(text) > longest:
        return []
    return [text] if _edges_fit(text, leaf) else []


def _edges_fit(text: str, leaf: Mapping[str, Any]) -> bool:
    """Return True if a pattern or format allows the white space at the text's edges.

    The pattern itself is not run: a hostile one could take exponential time.
    """
    pattern = leaf.get("pattern")
    if not isinstance(pattern, str):
        return "format" not in leaf or text == text.strip()
    first, last = _BLANK_FIRST.match(pattern), _BLANK_LAST.search(pattern)
    return text.startswith(_SPACE) == bool(first) and text.endswith(_SPACE) == bool(last)


def _same(value: Any, other: Any) -> bool:
    """Compare as JSON does; in Python `True == 1`."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def strict_json(
    text: str,
    *,
    lenient: bool = False,
    bounded: bool = False,
    constant: Callable[[str], Any] | None = None,
) -> Any:
    """Parse JSON without NaN and infinities.

    Args:
        text: the JSON.
        lenient: strings may contain raw line breaks and tabs, and the first of duplicate members
            counts.
        bounded: a number beyond all others becomes the largest one.
        constant: returns the value of a NaN or an infinity; None: they are no JSON.

    Raises:
        ValueError: the text is no such JSON.
    """
    return json.loads(
        text,
        strict=not lenient,
        parse_constant=constant or _not_json,
        parse_float=_bounded if bounded else _finite,
        object_pairs_hook=_first_members if lenient else None,
    )


def as_json(value: Any) -> str:
    """Return the value as JSON; lone surrogates are replaced, since UTF-8 cannot encode them."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def is_json(text: str) -> bool:
    """Return True if the text is JSON."""
    try:
        strict_json(text)
    except (ValueError, RecursionError):
        return False
    return True


def _first_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        members.setdefault(name, value)
    return members


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(number)  # JSON has no such number
    return value


def _bounded(number: str) -> float:
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))


def _not_json(name: str) -> Any:
    raise ValueError(name)
