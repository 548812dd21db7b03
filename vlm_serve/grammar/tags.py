"""Structural tags as grammars of llguidance.

Its lexer always takes the longest text. So a part without a fixed end, or a text that another one
begins with, has to be told apart in one terminal. Tags for which that is not done here are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar import searching
from vlm_serve.grammar.ebnf import exact, read, regular
from vlm_serve.grammar.kinds import kinds_of
from vlm_serve.grammar.lark import Lark, constant, either, pattern, without
from vlm_serve.grammar.lengths import Bounds, countable
from vlm_serve.grammar.library import Library
from vlm_serve.grammar.parameters import ANY, Parameters, both
from vlm_serve.grammar.references import Document, refuse
from vlm_serve.grammar.rewriting import rewrite

_JSON_STARTS = frozenset('{["-0123456789tfn')
_NUMBER_PARTS = frozenset("0123456789.eE+-")
_UNSUPPORTED = ("excludes", "any_order", "max_tokens", "max_chars")


@dataclass(frozen=True, slots=True)
class SchemaSource:
    """A schema of a structural tag, and the request's field that it comes from."""

    schema: Any
    of: Mapping[str, Any]

    def error(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return the error about the schema, with the function or the field that it belongs to."""
        message, name = error.message, self.of.get("function")
        if isinstance(name, str) and message.startswith(_SCHEMA):
            message = f"{_SCHEMA} of the function {name[:64]!r}{message[len(_SCHEMA) :]}"
        field = self.of.get("field")
        return InvalidRequestError(message, param=field if isinstance(field, str) else None)


_SCHEMA = "the JSON schema"


class Tags:
    """Writes the grammar of a structural tag.

    Args:
        library: tells whether texts fit.

    Attributes:
        sources: the schemas in it.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lark = Lark()
        self.sources: list[SchemaSource] = []
        self._counts = False
        self._begin = ""
        self._lengths: dict[str, dict[str, Bounds | None]] = {}

    @property
    def lengths(self) -> dict[str, dict[str, Bounds | None]]:
        """Bounds left out of the grammar, for `Counter`; empty: it has them all."""
        counted = any(bounds for named in self._lengths.values() for bounds in named.values())
        return self._lengths if counted else {}

    def grammar(self, tag: Mapping[str, Any]) -> str:
        """Return the whole grammar.

        Raises:
            InvalidRequestError: a schema or a part of the tag cannot be enforced. The message names
                the path in the schema, or the part.
        """
        self._counts = countable(tag.get("format"))
        return self._lark.text(self._format(tag.get("format"), []))

    def _format(self, node: Any, others: list[str]) -> str:
        """Return a rule.

        Args:
            others: texts with which an alternative of it begins.
        """
        rule: str = getattr(self, f"_{_kind(node)}")(node, others)
        return rule

    def _json_schema(self, node: Mapping[str, Any], others: list[str]) -> str:
        of = node.get("of")
        source = SchemaSource(node.get("json_schema"), of if isinstance(of, Mapping) else {})
        if any(text[:1] in _JSON_STARTS for text in others):
            raise _refused("an alternative of a schema begins like JSON")
        style = node.get("style", "json")
        if style not in ("json", "qwen_xml"):
            raise _refused(f"the style {str(style)[:64]!r} is not supported")
        self.sources.append(source)
        try:
            if style == "qwen_xml":
                return self._parameters(source.schema)
            schema = rewrite(source.schema, strict=source.of.get("strict") is True)
            if "function" in source.of:
                schema = _only_objects(schema)
            if schema is False:
                raise refuse("#", "cannot be satisfied by any value")
        except InvalidRequestError as error:
            raise source.error(error) from None
        return self._lark.json(schema)

    def _parameters(self, schema: Any) -> str:
        parameters = Parameters(self._lark, schema, self._library, counts=self._counts)
        rule = parameters.rule()
        if self._counts:
            self._lengths[self._begin] = parameters.lengths
        return rule

    def _const_string(self, node: Mapping[str, Any], others: list[str]) -> str:
        return self._constants([_text(node.get("value"))], others)

    def _constants(self, texts: list[str], others: list[str]) -> str:
        for text in texts:
            _tell_apart([text, *others])
            if text in others:
                raise _refused(f"two alternatives begin with {text[:64]!r}")
        return self._lark.terminal(either([constant(text) for text in texts]))

    def _regex(self, node: Mapping[str, Any], others: list[str]) -> str:
        """Return the rule of a text with this pattern, to which nothing is added."""
        return self._lark.terminal(both([self._endless(node), *_avoiding(others)]))

    def _grammar(self, node: Mapping[str, Any], others: list[str]) -> str:
        if others:
            return self._regex(node, others)
        return exact(read(_text(node.get("grammar"))), self._lark, self._library.has_text)

    _any_text = _regex

    def _endless(self, node: Mapping[str, Any]) -> str:
        """Return the terminal of a format without a fixed end."""
        if node["type"] == "regex":
            return regex(_text(node.get("pattern")))
        if node["type"] == "any_text":
            return ANY
        terminal = regular(read(_text(node.get("grammar"))), self._lark)
        if terminal is None:
            raise _refused("a grammar with a recursive rule cannot stand in a tag or beside others")
        return terminal

    def _or(self, node: Mapping[str, Any], others: list[str]) -> str:
        elements = _list(node.get("elements"))
        texts = [_text(element.get("value")) for element in elements if _is_text(element)]
        elements = [element for element in elements if not _is_text(element)]
        begins = [_begins(element) for element in elements]
        rules = []
        if texts:
            rules.append(self._constants(texts, others + sum(begins, [])))
        for index, element in enumerate(elements):
            other_begins = sum(begins[:index] + begins[index + 1 :], [])
            rules.append(self._format(element, [*others, *texts, *other_begins]))
        return self._lark.rule(either(rules))

    def _tag(self, node: Mapping[str, Any], others: list[str], skipped: int = 0) -> str:
        begin, content, ends = _text(node.get("begin")), _mapping(node.get("content")), _ends(node)
        _tell_apart([begin, *others])
        opening = self._lark.terminal(constant(begin[skipped:])) if begin[skipped:] else ""
        kind = _kind(content)
        if kind in _ENDLESS:
            whole = self._lark.terminal(_up_to(ends, self._endless(content)))
            return self._lark.rule(f"{opening} {whole}".strip())
        if kind not in _CLOSED:
            raise _refused(f"the format {kind} cannot stand in a tag")
        if any(end[:1] in _NUMBER_PARTS for end in ends) and kind == "json_schema":
            raise _refused("the end of a schema goes on like a number")
        self._begin = begin
        rule = self._format(content, [])
        if content.get("style") == "qwen_xml":  # each parameter ends with its line
            ends = [end.removeprefix("\n") for end in ends]
        _tell_apart(ends)
        closing = self._lark.terminal(either([constant(end) for end in ends]))
        return self._lark.rule(f"{opening} {rule} {closing}".strip())

    def _tags_with_separator(self, node: Mapping[str, Any], others: list[str]) -> str:
        tags = _list(node.get("tags"))
        _tell_apart(list(dict.fromkeys(_text(_mapping(tag).get("begin")) for tag in tags)))
        one = self._lark.rule(either([self._tag(_mapping(tag), others) for tag in tags]))
        rule = one
        if not node.get("stop_after_first"):
            between = self._lark.terminal(constant(_text(node.get("separator"))))
            rule = self._lark.rule(f"{one} ({between} {one})*")
        return rule if node.get("at_least_one") else self._lark.rule(f"{rule}?")

    def _triggered_tags(self, node: Mapping[str, Any], others: list[str]) -> str:
        """Return the rule of text with tags in it, each from its trigger on."""
        triggers = [_text(trigger) for trigger in _list(node.get("triggers"))]
        tags = [_mapping(tag) for tag in _list(node.get("tags"))]
        inside = any(a in b for a in triggers for b in triggers if a is not b)
        if others or inside or node.get("at_least_one"):
            raise _refused(
                "triggered_tags cannot stand beside others or have at_least_one, and no trigger "
                "may be inside another one"
            )
        calls = []
        for trigger in triggers:
            mine = [tag for tag in tags if _text(tag.get("begin")).startswith(trigger)]
            rests = [tag for tag in mine if len(tag["begin"]) > len(trigger)]
            _tell_apart(list(dict.fromkeys(tag["begin"] for tag in mine)))
            if not mine or len(rests) < len(mine):
                raise _refused(f"no tag goes on behind the trigger {trigger[:64]!r}")
            others_in = [other for other in triggers if other != trigger]
            before = self._lark.terminal(both([_up_to([trigger]), *_without(others_in)]))
            rest = either([self._tag(tag, [], len(trigger)) for tag in mine])
            calls.append(self._lark.rule(f"{before} {rest}"))
        plain = self._lark.terminal(both([ANY, *_without(triggers)]))
        if node.get("stop_after_first"):
            return self._lark.rule(either([*calls, plain]))
        return self._lark.rule(f"{either(calls)}* {plain}?")


_TYPES = frozenset(
    ["json_schema", "const_string", "regex", "grammar", "any_text", "or", "tag",
     "tags_with_separator", "triggered_tags"]
)  # fmt: skip
_ENDLESS = frozenset(["regex", "grammar", "any_text"])
_CLOSED = frozenset(["json_schema", "const_string", "tag", "tags_with_separator"])
"""Formats with an end that cannot be mistaken for something else."""


def regex(text: str) -> str:
    """Return the terminal of the texts that a pattern matches as a whole.

    Raises:
        InvalidRequestError: a grammar cannot follow it.
    """
    try:
        return pattern(searching.full(text))
    except searching.PatternError as error:
        raise InvalidRequestError(f"the grammar cannot be compiled: the regex {error}") from None


def _only_objects(schema: Any) -> Any:
    """Return the rewritten schema of the objects that fit a rewritten schema."""
    if isinstance(schema, bool):
        return {"type": "object"} if schema else False
    definitions = {"$defs": schema.get("$defs", {})}
    kinds = kinds_of(schema, Document(definitions))
    if kinds == {"object"} or "object" not in kinds:
        return schema if "object" in kinds else False
    return {**definitions, "allOf": [schema, {"type": "object"}]}


def _kind(node: Any) -> str:
    """Return the type of a format. Refuse one that is not written here."""
    kind = str(_mapping(node).get("type"))
    if kind not in _TYPES:
        raise _refused(f"the format {kind[:64]!r} is not supported")
    for name in _UNSUPPORTED:
        if node.get(name):
            raise _refused(f"{name} of the format {kind} is not supported")
    return kind


def _is_text(node: Any) -> bool:
    return isinstance(node, Mapping) and node.get("type") == "const_string"


def _begins(node: Any) -> list[str]:
    """Return texts with which an alternative begins, as far as they are known."""
    kind = _mapping(node).get("type")
    if kind == "tag":
        return [_text(node.get("begin"))]
    if kind == "tags_with_separator":
        return [_text(_mapping(tag).get("begin")) for tag in _list(node.get("tags"))]
    if kind == "or":
        return [text for element in _list(node.get("elements")) for text in _begins(element)]
    return [_text(node.get("value"))] if kind == "const_string" else []


def _ends(tag: Mapping[str, Any]) -> list[str]:
    end = tag.get("end")
    ends = [_text(ending) for ending in (end if isinstance(end, list) else [end])]
    if not all(ends):
        raise _refused("a tag has no end")
    return ends


def _up_to(ends: list[str], text: str = ANY) -> str:
    """Return the terminal of a text up to the first of these ends, which belongs to it."""
    end = pattern("|".join(searching.literal(ending) for ending in ends))
    return f"(({text} {end}) & {without(end, pattern('(?s:.)'))})"


def _without(texts: list[str]) -> list[str]:
    return [without(constant(text)) for text in texts]


def _avoiding(begins: list[str]) -> list[str]:
    return [without(constant(text), whole=True) for text in begins]


def _tell_apart(texts: list[str]) -> None:
    """Refuse texts of which one begins with another."""
    for text, after in pairwise(sorted(texts)):
        if after.startswith(text) and after != text:
            raise _refused(f"{after[:64]!r} begins with {text[:64]!r}, which may stand there too")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _refused("a text is missing")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _refused("a list is missing or empty")
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refused("a format is missing")
    return value


def _refused(fault: str) -> InvalidRequestError:
    return InvalidRequestError(f"the grammar cannot be compiled: {fault}")
