"""Grammars in EBNF as grammars of llguidance: a rule per name, and `root` is the whole answer.

    root ::= "yes" | digits{2,3}  # a comment
    digits ::= [0-9] [^\\x41-\\u005a]* (root | "")?

Rules have texts in quotation marks, classes of characters, names, groups, alternatives and
repetitions. A rule may go on over lines, up to the next name with `::=`.

The grammar of llguidance written from them matches the same texts. Its lexer always takes the
longest text. What names no recursive rule is regular and becomes one terminal, which is exact.
Between names of recursive rules a terminal is as long as may be: where it could go on with what
begins the part behind another one, it is cut into shorter ones, in the end into single characters,
which are exact as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from typing import NoReturn

from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar.lark import Lark, constant, pattern
from vlm_serve.grammar.searching import PatternError, escaped

ROOT = "root"
_DEPTH = 64
_SHALLOW = 8
_MOST_REPETITIONS = (1 << 31) - 1
_SPACE = r"(?:[ \t\r\n]|#[^\r\n]*)*+"
_NAME = r"[A-Za-z_.-][A-Za-z0-9_.-]*+"
_TOKEN = re.compile(
    rf"{_SPACE}(?:(?P<head>{_NAME}){_SPACE}::=|(?P<name>{_NAME})"
    r'|"(?P<text>(?:[^"\\\r\n]|\\[^\r\n])*+)"|\[(?P<set>(?:[^\]\\\r\n]|\\[^\r\n])*+)\]'
    r"|(?P<count>[*+?]|\{\s*\d{1,15}\s*(?:,\s*(?:\d{1,15}\s*)?)?\})|(?P<sign>\(=|[()|])"
    r"|(?P<end>\Z))"
)
_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]+)|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL
)
_CONTROLS = dict(zip("nrtabfve0", "\n\r\t\a\b\f\v\x1b\0", strict=True))
_QUOTED = "\"'?\\"
_QUOTED_IN_SET = _QUOTED + "^$.*+()[]{}|/-"
_MACROS = frozenset(["TagDispatch", "TokenTagDispatch", "Token", "ExcludeToken"])
_COUNTS: Mapping[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


_EMPTY = '""'
_ANY, _SOME = pattern("(?s:.*)"), pattern("(?s:.+)")
_RULES_DEPTH = 512
"""Of regular parts, whatever their names: the library follows them on the stack."""


@dataclass(frozen=True, slots=True)
class TextNode:
    """One text."""

    text: str


@dataclass(frozen=True, slots=True)
class Sign:
    """One character of a class, as a pattern."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Name:
    """What a rule matches."""

    name: str


@dataclass(frozen=True, slots=True)
class RowNode:
    """Parts, one after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class ChoiceNode:
    """One of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part, `least` to `most` times; None: any number of times."""

    part: Node
    least: int
    most: int | None


Node = TextNode | Sign | Name | RowNode | ChoiceNode | Repeat


def read(source: str) -> dict[str, Node]:
    """Return the rules of a grammar; each name in them has one.

    Raises:
        InvalidRequestError: it is invalid, or uses what cannot be enforced. The message names the
            line.
    """
    reader = _Reader(source)
    rules = reader.rules
    while not reader.ended:
        name = reader.take("head")
        if name in rules:
            reader.refuse(f"the rule {name[:64]!r} is there twice")
        rules[name] = reader.choice(1)
    for name, place in {ROOT: 0, **reader.named}.items():
        if name not in rules:
            reader.refuse(f"there is no rule {name[:64]!r}", place)
    return rules


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self.rules: dict[str, Node] = {}
        self.named: dict[str, int] = {}
        """The names in the rules, with their first places."""
        self._advance()

    def _advance(self) -> None:
        token = _TOKEN.match(self._source, self._at)
        if token is None:
            self._at = re.compile(_SPACE).match(self._source, self._at).end()  # type: ignore[union-attr]
            self.refuse(f"{self._source[self._at : self._at + 16]!r} cannot be read")
        self._kind = str(token.lastgroup)
        self._value = token[self._kind]
        self._at = token.end()

    def refuse(self, fault: str, place: int | None = None) -> NoReturn:
        """Raise the error about a place; None: the current one."""
        line = 1 + self._source.count("\n", 0, self._at if place is None else place)
        raise InvalidRequestError(f"the grammar cannot be compiled: line {line}: {fault}")

    @property
    def ended(self) -> bool:
        """True if nothing is left."""
        return self._kind == "end"

    def take(self, kind: str, value: str | None = None) -> str:
        """Return the token's text and go on.

        Raises:
            InvalidRequestError: it is of another kind or has another text.
        """
        if self._kind != kind or value not in (None, self._value):
            wanted = repr(value) if value else "a rule, as in: name ::="
            self.refuse(f"it needs {wanted} before {self._value[:64] or 'its end'!r}")
        taken = self._value
        self._advance()
        return taken

    def choice(self, depth: int) -> Node:
        """Read alternatives up to a closing bracket or the next rule."""
        if depth > _DEPTH:
            self.refuse(f"it is nested deeper than {_DEPTH} levels")
        parts = [self._row(depth)]
        while (self._kind, self._value) == ("sign", "|"):
            self._advance()
            parts.append(self._row(depth))
        return parts[0] if len(parts) == 1 else ChoiceNode(tuple(parts))

    def _row(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._kind in ("name", "text", "set") or self._value in ("(", "(="):
            part = self._part(depth)
            if self._kind == "count":
                part = Repeat(part, *self._bounds())
            parts.append(part)
        if not parts:
            self.refuse(f"an alternative is empty before {self._value[:64] or 'its end'!r}")
        return parts[0] if len(parts) == 1 else RowNode(tuple(parts))

    def _part(self, depth: int) -> Node:
        kind, value, place = self._kind, self._value, self._at
        self._advance()
        if kind == "text":
            return TextNode("".join(sign for sign, _ in self._signs(value, _QUOTED)))
        if kind == "set":
            return self._set(value)
        if kind == "name":
            if value in _MACROS and self._value == "(":
                self.refuse(f"{value} cannot be enforced")
            self.named.setdefault(value, place)
            return Name(value)
        if value == "(=":
            self.refuse("looking ahead with (= ...) cannot be enforced")
        empty = (self._kind, self._value) == ("sign", ")")
        part = RowNode(()) if empty else self.choice(depth + 1)
        self.take("sign", ")")
        if depth % _SHALLOW:
            return part
        name = f"({len(self.rules)}"  # the library has a limit for the brackets of one rule
        self.rules[name] = part
        return Name(name)

    def _bounds(self) -> tuple[int, int | None]:
        value = self.take("count")
        if value in _COUNTS:
            return _COUNTS[value]
        first, comma, last = (bound.strip() for bound in value[1:-1].partition(","))
        least, most = int(first), int(last) if last else None if comma else int(first)
        if most is not None and least > most:
            self.refuse(f"a repetition has more than {most} times at least")
        if max(least, most or 0) > _MOST_REPETITIONS:
            self.refuse(f"a repetition has more than {_MOST_REPETITIONS} times")
        return least, most

    def _set(self, value: str) -> Node:
        """Return a class of characters; one without any matches nothing."""
        negated = value.startswith("^")
        signs = self._signs(value[negated:], _QUOTED_IN_SET)
        parts, at = list[str](), 0
        while at < len(signs):
            first = last = signs[at][0]
            if signs[at + 1 : at + 2] == [("-", False)] and at + 2 < len(signs):
                at += 2
                last = signs[at][0]
            if first > last:
                self.refuse(f"a class has a range that ends before it begins: {value[:64]!r}")
            parts.append(escaped(first) if first == last else f"{escaped(first)}-{escaped(last)}")
            at += 1
        if not parts:
            return Sign(r"[\s\S]" if negated else r"[^\s\S]")
        return Sign(f"[{'^' if negated else ''}{''.join(parts)}]")

    def _signs(self, value: str, quoted: str) -> list[tuple[str, bool]]:
        """Return the characters of a text or a class, and whether each is escaped."""
        signs = []
        for match in _CHARACTER.finditer(value):
            sign = match[5] or match[4]
            try:
                if sign is None:
                    sign = chr(int(match[1] or match[2] or match[3], 16))
                elif match[4]:
                    sign = sign if sign in quoted else _CONTROLS[sign]
                escaped(sign)
            except (KeyError, ValueError, OverflowError, PatternError):
                self.refuse(f"{match[0][:16]} is no character")
            signs.append((sign, match[5] is None))
        return signs


Signs = frozenset[str]
"""Terminals of single characters."""
First = tuple[Signs, bool]
"""The first characters of a part's texts, and whether one of these is empty."""


def regular(rules: dict[str, Node], lark: Lark) -> str | None:
    """Return the terminal of a grammar; None: a rule of it is recursive."""
    terminals = _Terminals(rules, lark)
    return None if terminals.recursive else terminals.whole(Name(ROOT))


def exact(rules: dict[str, Node], lark: Lark, has_text: Callable[[str], bool]) -> str:
    """Return the rule of a grammar, or its only terminal.

    Args:
        has_text: returns whether a grammar of one terminal matches some text.
    """
    terminals = _Terminals(rules, lark)
    opened: set[str] = set()
    if not terminals.recursive:
        return terminals.whole(Name(ROOT))
    while True:
        units = _Units(terminals, opened)
        clashing = units.clashing(lambda body: has_text(lark.alone(body)))
        if not clashing:
            return units.write(lark)
        opened |= clashing


class _Terminals:
    """The regular parts of a grammar.

    Args:
        rules: as from `read`.
        lark: the grammar that gets their terminals.
    """

    def __init__(self, rules: dict[str, Node], lark: Lark) -> None:
        self.rules = rules
        self.lark = lark
        self._names: dict[str, str] = {}
        self._first: dict[str, First] = {}
        self._depths: dict[str, int] = {}
        waiting, graph = [ROOT], dict[str, list[str]]()
        while waiting:
            name = waiting.pop()
            if name not in graph:
                graph[name] = list(_named(rules[name]))
                waiting += graph[name]
        self.recursive = [name for name in rules if name in graph]
        sorter = TopologicalSorter(graph)
        with suppress(CycleError):  # the rules before a circle still come
            sorter.prepare()
        while ready := sorter.get_ready():
            for name in ready:
                self._depths[name] = self._depth(rules[name])
                if self._depths[name] > _RULES_DEPTH:
                    raise InvalidRequestError(
                        f"the grammar cannot be compiled: rules nest over {_RULES_DEPTH} levels"
                    )
                self._names[name] = self.whole(rules[name])
                self._first[name] = self.first(rules[name])
                self.recursive.remove(name)
            sorter.done(*ready)

    def regular(self, node: Node) -> bool:
        """Return True if no rule in a part is recursive."""
        return all(name in self._names for name in _named(node))

    def _depth(self, node: Node) -> int:
        if isinstance(node, Name):
            return self._depths[node.name]
        return 1 + max(map(self._depth, _parts(node)), default=0)

    def whole(self, node: Node) -> str:
        """Return the terminal of a regular part."""
        if isinstance(node, Name):
            return self._names[node.name]
        return self.lark.terminal(_written(node, self._names))

    def first(self, node: Node) -> First:
        """Return the first characters of a regular part's texts, and whether one is empty."""
        return _first_of(node, self._first)


class _Units:
    """The recursive rules of a grammar over terminals of regular parts, which are units here.

    Args:
        terminals: of the grammar.
        opened: those that may be no units.
    """

    def __init__(self, terminals: _Terminals, opened: set[str]) -> None:
        self._terminals = terminals
        self._opened = opened
        self._units: dict[str, Node] = {}
        self._names = {name: f"x{at}" for at, name in enumerate(terminals.recursive)}
        self._rules = {
            self._names[name]: self._tree(terminals.rules[name]) for name in terminals.recursive
        }
        self._first = {name: terminals.first(node) for name, node in self._units.items()}
        self._first |= dict.fromkeys(self._rules, (frozenset(), False))
        self._after: dict[str, Signs] = dict.fromkeys([*self._units, *self._rules], frozenset())
        while sum(map(self._learn_first, self._rules)):
            pass
        while sum(self._learn_after(rule, self._after[name]) for name, rule in self._rules.items()):
            pass

    def clashing(self, has_text: Callable[[str], bool]) -> set[str]:
        """Return units of several characters that another one could go on as, past its end."""
        longer = {name for name, node in self._units.items() if not _is_single(node)}
        past = [
            f"({name} & {_SOME}) ({' | '.join(sorted(self._after[name]))}) {_ANY}"
            for name in self._units if self._after[name]
        ]  # fmt: skip
        if not longer or not past:
            return set()
        ends = self._terminals.lark.terminal(" | ".join(past))
        if not has_text(f"{ends} & ({' | '.join(sorted(longer))})"):
            return set()
        return {name for name in longer if has_text(f"{ends} & {name}")} or longer

    def write(self, lark: Lark) -> str:
        """Write the rules and return the name of the first one."""
        for name, tree in self._rules.items():
            lark.define(name, _written(tree))
        return self._names[ROOT]

    def _tree(self, node: Node) -> Node:
        """Return a part with the names of units and recursive rules in it."""
        if self._terminals.regular(node):
            return self._unit(node)
        match node:
            case RowNode(parts):
                groups = groupby(parts, self._terminals.regular)
                joined = [[RowNode(tuple(run))] if known else list(run) for known, run in groups]
                return RowNode(tuple(self._tree(part) for run in joined for part in run))
            case ChoiceNode(parts):
                plain, others = self._parted(parts)
                return ChoiceNode(tuple(map(self._tree, [*plain, *others])))
            case Repeat(ChoiceNode(parts), (0 | 1) as least, None):
                plain, others = self._parted(parts)
                if plain:
                    return self._tree(_runs(plain[0], ChoiceNode(tuple(others)), least))
        if isinstance(node, Repeat):
            return Repeat(self._tree(node.part), node.least, node.most)
        assert isinstance(node, Name)
        return Name(self._names[node.name])

    def _parted(self, parts: tuple[Node, ...]) -> tuple[list[Node], list[Node]]:
        """Return the regular alternatives as one, if there are any, and the others."""
        plain = tuple(part for part in parts if self._terminals.regular(part))
        others = [part for part in parts if not self._terminals.regular(part)]
        return [ChoiceNode(plain)] if plain else [], others

    def _unit(self, node: Node) -> Node:
        name = self._terminals.whole(node)
        if name not in self._opened:
            self._units[name] = node
            return Name(name)
        match node:
            case TextNode(text):
                return RowNode(tuple(self._unit(TextNode(sign)) for sign in text))
            case Name(rule):
                return self._unit(self._terminals.rules[rule])
            case RowNode(parts) | ChoiceNode(parts):
                return type(node)(tuple(map(self._unit, parts)))
            case Repeat(part, least, most):
                return Repeat(self._unit(part), least, most)
        raise AssertionError("a single character is opened")

    def _learn_first(self, name: str) -> bool:
        """Return True if more is known of a rule's first characters than before."""
        before, self._first[name] = self._first[name], _first_of(self._rules[name], self._first)
        return before != self._first[name]

    def _learn_after(self, tree: Node, after: Signs) -> bool:
        """Note the characters that may stand behind a part. Return True if some are new."""
        match tree:
            case Name(name):
                before = self._after[name]
                self._after[name] |= after
                return before != self._after[name]
            case Repeat(part, _, most):
                again = frozenset() if most == 1 else _first_of(part, self._first)[0]
                return self._learn_after(part, after | again)
            case ChoiceNode(parts):
                return sum(self._learn_after(part, after) for part in parts) > 0
        assert isinstance(tree, RowNode)
        changed = False
        for part in reversed(tree.parts):
            changed |= self._learn_after(part, after)
            signs, empty = _first_of(part, self._first)
            after = signs | after if empty else signs
        return changed


def _first_of(node: Node, known: Mapping[str, First]) -> First:
    """Return the first characters of a part's texts, and whether one is empty.

    Args:
        known: the same of the names in it.
    """
    match node:
        case TextNode(text):
            return frozenset(map(constant, text[:1])), not text
        case Sign(text):
            return frozenset([pattern(text)]), False
        case Name(name):
            return known[name]
        case Repeat(part, least, most):
            signs, empty = _first_of(part, known)
            return (frozenset(), True) if most == 0 else (signs, empty or not least)
        case ChoiceNode(parts):
            firsts = [_first_of(part, known) for part in parts]
            return frozenset().union(*(signs for signs, _ in firsts)), any(e for _, e in firsts)
    signs = frozenset()
    for part in node.parts:
        more, empty = _first_of(part, known)
        signs |= more
        if not empty:
            return signs, False
    return signs, True


def _named(node: Node) -> Iterator[str]:
    """Yield the names in a part."""
    if isinstance(node, Name):
        yield node.name
    for part in _parts(node):
        yield from _named(part)


def _parts(node: Node) -> tuple[Node, ...]:
    if isinstance(node, RowNode | ChoiceNode):
        return node.parts
    return (node.part,) if isinstance(node, Repeat) else ()


def _runs(plain: Node, other: Node, least: int) -> Node:
    """Return any number of two alternatives, with each run of the first one as one part."""
    rest = RowNode((other, Repeat(plain, 0, None)))
    if not least:
        return RowNode((Repeat(plain, 0, None), Repeat(rest, 0, None)))
    return ChoiceNode(
        (RowNode((Repeat(plain, 1, None), Repeat(rest, 0, None))), Repeat(rest, 1, None))
    )


def _is_single(node: Node) -> bool:
    return isinstance(node, Sign) or (isinstance(node, TextNode) and len(node.text) < 2)


def _written(node: Node, names: Mapping[str, str] | None = None) -> str:
    """Return a part as the body of a rule or a terminal.

    Args:
        names: of the names in it; None: they stay.
    """
    match node:
        case TextNode(text):
            return constant(text)
        case Sign(text):
            return pattern(text)
        case Name(name):
            return names[name] if names else name
        case RowNode(parts):
            return f"({' '.join(_written(part, names) for part in parts)})" if parts else _EMPTY
        case ChoiceNode(parts):
            return f"({' | '.join(_written(part, names) for part in parts)})"
        case Repeat(_, _, 0):
            return _EMPTY
    most = "" if node.most is None else node.most
    return f"({_written(node.part, names)}){{{node.least},{most}}}"
