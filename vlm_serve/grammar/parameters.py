"""Grammars of arguments in tags, a parameter per property.

<parameter=name>
value
</parameter>

A string stands there as it is, up to the closing tag, any other value as JSON. A lexer that
follows strings and JSON at once would go on with the string. So a string may not begin like the
JSON that is allowed beside it, nor be what a reader takes for another kind of value. It is a
terminal: one can be intersected and negated, so that all keywords for strings are held beside each
other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

from vlm_serve.grammar import searching
from vlm_serve.grammar.forms import KEYWORDS_OF
from vlm_serve.grammar.kinds import (
    ALL,
    NUMBERS,
    Kinds,
    allowed,
    kind_of,
    kinds_of,
    kinds_of_parameter,
    own_kinds,
)
from vlm_serve.grammar.lark import Lark, constant, either, pattern, without
from vlm_serve.grammar.lengths import END as VALUE_END
from vlm_serve.grammar.lengths import NAME, NAME_END, Bounds
from vlm_serve.grammar.library import UNSATISFIABLE, Library, sentence
from vlm_serve.grammar.references import Document, quoted, refuse
from vlm_serve.grammar.rewriting import rewrite

BEGIN, BEGIN_END, END = NAME.decode(), NAME_END.decode(), VALUE_END.decode()
_NOT_CLOSED = without(constant("</parameter>"))
_NAME = re.compile(r"[^<>\s\"'](?:[^<>\n]{0,254}[^<>\s\"'])?")
_OTHER_NAME = pattern(r"[^<>\s\x{22}\x{27}](?:[^<>\n]{0,62}[^<>\s\x{22}\x{27}])?")
_INTEGER = "-?(?:0|[1-9][0-9]*)"
_NUMBER = rf"{_INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_STARTS = {"object": r"\x{7b}", "array": r"\x{5b}", "number": "[-0-9]"}
_WORDS: tuple[tuple[str, str, bool | None], ...] = (
    ("true", "boolean", True), ("false", "boolean", False), ("null", "null", None),
)  # fmt: skip


_MOST = 64
_DEPTH = 32
Matches = Callable[[str, str], bool]
"""Tells whether a pattern is found in a name."""
_LAYER = ("properties", "patternProperties", "additionalProperties")


ANY = pattern(searching.ANY)
_MOST_EXCLUSIVE = 16
_TEXT_DEPTH = 16
_NONE: Bounds = (1, 0)
"""Bounds that no string keeps."""


class Parameters:
    """Writes the arguments of one function.

    Args:
        lark: the grammar that gets the rules.
        schema: the parameters' schema.
        library: tells whether texts fit.
        counts: bounds of texts may be left to `Counter`.

    Attributes:
        lengths: the bounds left to it, by property.

    Raises:
        InvalidRequestError: from all methods: the schema cannot be enforced; it names the path.
    """

    def __init__(self, lark: Lark, schema: Any, library: Library, *, counts: bool = False) -> None:
        self._lark, self._library = lark, library
        self._given = Document(schema)
        whole = rewrite(schema)
        self._whole = {} if whole is True else whole
        self._definitions = {} if whole is False else self._whole.pop("$defs", {})
        self._defined = Document({"$defs": self._definitions})
        self._raw = RawTexts(lark, self._definitions)
        self._kinds_by_name: dict[str, Kinds] = {}
        self._counts = counts
        self.lengths: dict[str, Bounds | None] = {}

    def rule(self) -> str:
        """Return the name of the rule for all parameters. Each ends with its line."""
        shapes = _Shapes(self._definitions).of(self._whole, "#", _DEPTH)
        if len(shapes) > 1:
            self._counts = False  # a name may have other bounds in another shape
            self._kinds_by_name = self._all_kinds(shapes)
        rules = [rule for rule in map(self._shape, shapes) if rule is not None]
        if not rules:
            raise refuse("#", "cannot be satisfied by any value")
        return self._lark.rule(" | ".join(rules))

    def _all_kinds(self, shapes: list[Shape]) -> dict[str, Kinds]:
        """Return the kinds that a parameter has in any shape; "": one that none names."""
        rest = [self._kinds(schema) for shape in shapes for _, schema in shape.others()]
        names = dict.fromkeys(name for shape in shapes for name in shape.names)
        kinds = {
            name: [self._kinds(shape.schema(name, self._matches)) for shape in shapes]
            for name in names
        }
        by_name = {
            name: frozenset().union(*shape_kinds, *rest) for name, shape_kinds in kinds.items()
        }
        return by_name | {"": frozenset().union(*rest, *by_name.values())}

    def _matches(self, searched: str, name: str) -> bool:
        """Return True if the pattern of a property's name is found in it."""
        text = pattern(self._searching(searched, "#/patternProperties"))
        return self._has_text(both([constant(name), text]))

    def _shape(self, shape: Shape) -> str | None:
        """Return the rule of one shape; None: no arguments have it."""
        parts: list[tuple[str, bool]] = []
        for name in shape.names:
            value = self._value(shape.schema(name, self._matches), name)
            if value is None or not _NAME.fullmatch(name):
                if name in shape.required and value is not None:
                    raise refuse(_place(name), "has a name that a tag cannot have")
                if name in shape.required:
                    return None
                continue
            begin = self._lark.terminal(constant(f"{BEGIN}{name}{BEGIN_END}"))
            parts.append((self._lark.rule(f"{begin} {value}"), name in shape.required))
        others = [rule for rule in (self._others(shape, rest) for rest in shape.others()) if rule]
        return self._counted(shape, parts, either(others))

    def _counted(self, shape: Shape, parts: list[tuple[str, bool]], other: str) -> str | None:
        needed = sum(required for _, required in parts)
        least, most = max(0, shape.least - needed), shape.most
        if most is not None and most < needed:
            return None
        if most == len(parts) == needed:
            other = ""
        if most is not None and not other and most >= len(parts):
            most = None
        if least and not other and len(parts) == needed:
            return None
        optional = len(parts) > needed
        if optional and (most is not None or least > 1):
            raise refuse("#", "limits the number of properties of which some are optional")
        if least == 1 and optional:
            return self._at_least_one(parts, other)
        words = [name if required else f"{name}?" for name, required in parts]
        if other:
            words.append(f"{other}{{{least},{'' if most is None else most - needed}}}")
        return self._lark.rule(" ".join(words) or '""')

    def _at_least_one(self, parts: list[tuple[str, bool]], other: str) -> str:
        """Return the rule of optional parameters of which one is there."""
        rule, rest = (self._lark.rule(f"{other}+"), f"{other}*") if other else ("", "")
        for name, _ in reversed(parts):
            rule = self._lark.rule(either([f"{name} {rest}".strip(), rule]))
            rest = self._lark.rule(f"{name}? {rest}".strip())
        return rule

    def _others(self, shape: Shape, other: tuple[str | None, Any]) -> str | None:
        """Return the rule of a parameter that the schema does not name.

        Args:
            other: the pattern of its name, or None, and its schema.
        """
        searched, node = other
        value = self._value(node, "")
        if value is None:
            return None
        wholes = {
            name_pattern: pattern(self._searching(name_pattern, "#"))
            for name_pattern in shape.patterns
        }
        excluded = [constant(name) for name in shape.names if _NAME.fullmatch(name)]
        excluded += [text for name_pattern, text in wholes.items() if name_pattern != searched]
        names = [_OTHER_NAME, *(f"~{text}" for text in excluded)]
        if searched is not None:
            names.append(wholes[searched])
        begin = f"{constant(BEGIN)} {both(names)} {constant(BEGIN_END)}"
        if not self._has_text(begin):
            return None
        return self._lark.rule(f"{self._lark.terminal(begin)} {value}")

    def _kinds(self, node: Any) -> Kinds:
        return kinds_of(node, self._defined)

    def _has_text(self, terminal: str) -> bool:
        return self._library.has_text(self._lark.alone(terminal))

    def _searching(self, text: str, path: str) -> str:
        try:
            return searching.whole(text)
        except searching.PatternError as error:
            raise refuse(path, str(error)) from None

    def _value(self, node: Any, name: str) -> str | None:
        """Return the rule of a value with its closing tag; None: no value fits.

        Args:
            name: the parameter's; "": any that the schema does not name.
        """
        bounds = self._left_out(node, name)
        try:
            text = ANY if bounds else self._raw.terminal(node)
        except searching.PatternError as wrong:
            raise refuse(_place(name), str(wrong)) from None
        kinds, schema = self._kinds(node), node
        if text or self._kinds_by_name:
            read = kinds_of_parameter(self._given, name) | kinds if name else ALL
            text, kinds = self._string_or_json(
                node, text, kinds, read, self._kinds_by_name.get(name)
            )
            schema = {"allOf": [node, {"type": sorted(kinds)}]}
        rules = []
        if text and self._has_text(text):
            rules.append(self._lark.terminal(f"{text} {constant(END)}"))
        if kinds:
            whole = {"$defs": self._definitions, **({} if schema is True else schema)}
            error = self._library.json_error(whole)
            if error and not error.startswith(UNSATISFIABLE):
                raise refuse(_place(name), sentence(error))
            if not error:
                rules.append(f"{self._lark.json(whole)} {self._lark.terminal(constant(END))}")
        return self._lark.rule(" | ".join(rules)) if rules else None

    def _left_out(self, node: Any, name: str) -> Bounds | None:
        """Return the bounds of a text without other rules; None: they stay in the grammar.

        With another rule, a text could come to a place where it may neither end nor go on.
        """
        bounds = self._raw.lengths(node) if self._counts and name else None
        if bounds is None or bounds == (0, None):
            return None
        least, most = bounds
        for kind in (kinds_of_parameter(self._given, name) | self._kinds(node)) - {"string"}:
            words = [(word, value) for word, of, value in _WORDS if of == kind]
            free = all(self._raw.takes(node, value) for _, value in words)
            sizes = [len(word) for word, _ in words]
            if not words or not free or least > min(sizes) or most in range(max(sizes)):
                return None
        self.lengths[name] = bounds
        return bounds

    def _string_or_json(
        self, node: Any, text: str, kinds: Kinds, read: Kinds, elsewhere: Kinds | None
    ) -> tuple[str, Kinds]:
        """Return the terminal of a value that may be a string, and the kinds left for JSON.

        Args:
            text: the terminal of the strings.
            kinds: the kinds that fit.
            read: the kinds that a reader takes the text for.
            elsewhere: the kinds that other shapes have for this parameter.
        """
        kept, also = [_NOT_CLOSED], list[str]()
        left: Kinds = frozenset()
        for word, kind, value in _WORDS:
            if self._raw.takes(node, value):
                also.append(constant(word))
            elif kind in read:
                kept.append(f"~{constant(word)}")
        for kind in ("object", "array", "number"):
            mine = kinds & (NUMBERS if kind == "number" else {kind})
            theirs = read & (NUMBERS if kind == "number" else {kind})
            free = mine == theirs and all(self._raw.takes_all(node, kind) for kind in mine)
            other = elsewhere is not None and bool(elsewhere & theirs)
            if not theirs or (free and text == ANY and not other):
                continue
            if free and kind == "number" and not other:
                also.append(pattern(_NUMBER if mine == NUMBERS else _INTEGER))
                continue
            left |= mine
            if mine or other or kind != "number":
                kept.append(without(pattern(_STARTS[kind]), whole=True))
            else:
                kept.append(f"~{pattern(_NUMBER)}")
        return either([both([text, *kept]), *also]), left


def _place(name: str) -> str:
    if not name:
        return "#/additionalProperties"
    return f"#/properties/{quoted(name)}"


@dataclass(frozen=True, slots=True)
class Shape:
    """Objects of one shape. Every combination of alternatives is a shape of its own.

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

    @property
    def names(self) -> list[str]:
        """All names that the layers speak of, in order."""
        return list(dict.fromkeys([*self._keys("properties"), *sorted(self.required)]))

    @property
    def patterns(self) -> list[str]:
        return list(dict.fromkeys(self._keys("patternProperties")))

    def _keys(self, keyword: str) -> list[str]:
        return [key for layer in self.layers for key in layer.get(keyword, ())]

    def schema(self, name: str, matches: Matches) -> Any:
        """Return the schema of a property's value."""
        return _all([part for layer in self.layers for part in _parts(layer, name, matches)])

    def others(self) -> list[tuple[str | None, Any]]:
        """Return (pattern of the name, schema) of other properties; None: no pattern fits."""
        rests: list[tuple[str | None, Any]] = []
        for searched in (*self.patterns, None):
            parts = []
            for layer in self.layers:
                patterns = layer.get("patternProperties", {})
                rest = layer.get("additionalProperties", True)
                parts.append(rest if searched is None else patterns.get(searched, rest))
            schema = _all(parts)
            if schema is not False:
                rests.append((searched, schema))
        return rests

    def joined(self, other: Shape) -> Shape:
        """Return the shape of the objects that have both."""
        bounds = [most for most in (self.most, other.most) if most is not None]
        return Shape(
            tuple({id(layer): layer for layer in (*self.layers, *other.layers)}.values()),
            self.required | other.required,
            max(self.least, other.least),
            min(bounds, default=None),
        )


class _Shapes:
    """Finds the shapes of the objects that fit a rewritten schema.

    Raises:
        InvalidRequestError: from `of`: there are too many, or a list of values stands for them.
    """

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
        choices = [[_plain_shape(node)]]
        if "$ref" in node:
            choices.append(self._definition(node["$ref"].rsplit("/", 1)[-1], path, depth - 1))
        for part in node.get("allOf", ()):
            choices.append(self.of(part, f"{path}/allOf", depth - 1))
        if "anyOf" in node:
            parts = [self.of(part, f"{path}/anyOf", depth - 1) for part in node["anyOf"]]
            choices.append([shape for shapes in parts for shape in shapes])
        if math.prod(map(len, choices)) > _MOST:
            raise refuse(path, "nests too many combinations of schemas")
        return [reduce(Shape.joined, shapes) for shapes in product(*choices)]

    def _definition(self, name: str, path: str, depth: int) -> list[Shape]:
        if name not in self._known:
            self._known[name] = []  # a definition that is itself has no shape
            self._known[name] = self.of(self._definitions[name], path, depth)
        return self._known[name]


def _plain_shape(node: Mapping[str, Any]) -> Shape:
    """Return the shape of a schema without its combinations."""
    layer = {name: node[name] for name in _LAYER if name in node}
    required, least = frozenset(node.get("required", ())), node.get("minProperties", 0)
    return Shape((layer,) if layer else (), required, least, node.get("maxProperties"))


def _parts(layer: Mapping[str, Any], name: str, matches: Matches) -> list[Any]:
    """Return the schemas that a layer has for a property."""
    properties = layer.get("properties", {})
    parts = [properties[name]] if name in properties else []
    patterns = layer.get("patternProperties", {})
    parts += [schema for searched, schema in patterns.items() if matches(searched, name)]
    return parts or [layer.get("additionalProperties", True)]


def _all(parts: list[Any]) -> Any:
    """Return the schema of values that fit all parts."""
    kept = [part for part in parts if part is not True]
    if any(part is False for part in kept):
        return False
    return True if not kept else kept[0] if len(kept) == 1 else {"allOf": kept}


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
        parts = self._plain_parts(node)
        if "$ref" in node:
            parts.append(self._definition(node["$ref"]))
        parts += [self.terminal(part) for part in node.get("allOf", ())]
        if "anyOf" in node:
            parts.append(_any([self.terminal(part) for part in node["anyOf"]]))
        if "oneOf" in node:
            parts.append(_one([self.terminal(part) for part in node["oneOf"]]))
        return both(parts)

    def _plain_parts(self, node: Mapping[str, Any]) -> list[str]:
        shortest, longest = node.get("minLength", 0), node.get("maxLength")
        values = allowed(node)
        if values is not None:
            texts = [text for text in values if isinstance(text, str)]
            fitting = [text for text in texts if shortest <= len(text)
                       and (longest is None or len(text) <= longest)]  # fmt: skip
            parts = [either([constant(text) for text in fitting])]
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
        bounds = self._lengths(node, _TEXT_DEPTH)
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
            lengths = {self._lengths(part, depth - 1) for part in node["anyOf"]} - {_NONE}
            parts.append(lengths.pop() if len(lengths) == 1 else None)
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
            rule = self.terminal(self._definitions[name])
            self._known[name] = rule if rule in ("", ANY) else self._lark.terminal(rule)
        return self._known[name]

    def takes_all(self, node: Any, kind: str) -> bool:
        """Return True if all values of a kind certainly fit a schema."""
        if isinstance(node, bool):
            return node
        if kind not in own_kinds(node) or allowed(node) is not None or "oneOf" in node:
            return False
        if node.keys() & KEYWORDS_OF[kind]:
            return False
        return self._combined(node, kind, self.takes_all)

    def takes(self, node: Any, value: bool | None) -> bool:
        """Return True if true, false or null fits a schema."""
        if isinstance(node, bool):
            return node
        values = allowed(node)
        listed = values is None or any(entry is value for entry in values)
        if not listed or kind_of(value) not in own_kinds(node):
            return False
        fitting = [part for part in node.get("oneOf", ()) if self.takes(part, value)]
        if "oneOf" in node and len(fitting) != 1:
            return False
        return self._combined(node, value, self.takes)

    def _combined(self, node: Any, about: Any, takes: Callable[[Any, Any], bool]) -> bool:
        """Return True if all parts take it, and one alternative. Each definition is asked once."""
        key = (id(node), about)
        if key not in self._answers:
            self._answers[key] = False  # a definition that is only itself
            parts = [*node.get("allOf", ()), *self._referred(node)]
            self._answers[key] = all(takes(part, about) for part in parts) and (
                "anyOf" not in node or any(takes(part, about) for part in node["anyOf"])
            )
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
