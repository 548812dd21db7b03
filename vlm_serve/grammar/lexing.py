"""Writes rules of EBNF as a grammar of llguidance that matches the same texts.

Its lexer always takes the longest text. What names no recursive rule is regular and becomes one
terminal, which is exact. Between names of recursive rules a terminal is as long as may be: where
it could go on with what begins the part behind another one, it is cut into shorter ones, in the end
into single characters, which are exact as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from itertools import groupby

from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar.ebnf import ROOT, Choice, Name, Node, Repeat, Row, Sign, Text
from vlm_serve.grammar.lark import Lark, constant, pattern

_EMPTY = '""'
_ANY, _SOME = pattern("(?s:.*)"), pattern("(?s:.+)")
_DEPTH = 512
"""Of regular parts, whatever their names: the library follows them on the stack."""
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
                if self._depths[name] > _DEPTH:
                    raise InvalidRequestError(
                        f"the grammar cannot be compiled: rules nest over {_DEPTH} levels"
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
        while sum(self._learn_after(each, self._after[name]) for name, each in self._rules.items()):
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
            case Row(parts):
                groups = groupby(parts, self._terminals.regular)
                joined = [[Row(tuple(each))] if known else list(each) for known, each in groups]
                return Row(tuple(self._tree(part) for each in joined for part in each))
            case Choice(parts):
                plain, others = self._parted(parts)
                return Choice(tuple(map(self._tree, [*plain, *others])))
            case Repeat(Choice(parts), (0 | 1) as least, None):
                plain, others = self._parted(parts)
                if plain:
                    return self._tree(_runs(plain[0], Choice(tuple(others)), least))
        if isinstance(node, Repeat):
            return Repeat(self._tree(node.part), node.least, node.most)
        assert isinstance(node, Name)
        return Name(self._names[node.name])

    def _parted(self, parts: tuple[Node, ...]) -> tuple[list[Node], list[Node]]:
        """Return the regular alternatives as one, if there are any, and the others."""
        plain = tuple(part for part in parts if self._terminals.regular(part))
        others = [part for part in parts if not self._terminals.regular(part)]
        return [Choice(plain)] if plain else [], others

    def _unit(self, node: Node) -> Node:
        name = self._terminals.whole(node)
        if name not in self._opened:
            self._units[name] = node
            return Name(name)
        match node:
            case Text(text):
                return Row(tuple(self._unit(Text(sign)) for sign in text))
            case Name(rule):
                return self._unit(self._terminals.rules[rule])
            case Row(parts) | Choice(parts):
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
            case Choice(parts):
                return sum(self._learn_after(part, after) for part in parts) > 0
        assert isinstance(tree, Row)
        found = False
        for part in reversed(tree.parts):
            found |= self._learn_after(part, after)
            signs, empty = _first_of(part, self._first)
            after = signs | after if empty else signs
        return found


def _first_of(node: Node, known: Mapping[str, First]) -> First:
    """Return the first characters of a part's texts, and whether one is empty.

    Args:
        known: the same of the names in it.
    """
    match node:
        case Text(text):
            return frozenset(map(constant, text[:1])), not text
        case Sign(text):
            return frozenset([pattern(text)]), False
        case Name(name):
            return known[name]
        case Repeat(part, least, most):
            signs, empty = _first_of(part, known)
            return (frozenset(), True) if most == 0 else (signs, empty or not least)
        case Choice(parts):
            found = [_first_of(part, known) for part in parts]
            return frozenset().union(*(each for each, _ in found)), any(e for _, e in found)
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
    if isinstance(node, Row | Choice):
        return node.parts
    return (node.part,) if isinstance(node, Repeat) else ()


def _runs(plain: Node, other: Node, least: int) -> Node:
    """Return any number of two alternatives, with each run of the first one as one part."""
    rest = Row((other, Repeat(plain, 0, None)))
    if not least:
        return Row((Repeat(plain, 0, None), Repeat(rest, 0, None)))
    return Choice((Row((Repeat(plain, 1, None), Repeat(rest, 0, None))), Repeat(rest, 1, None)))


def _is_single(node: Node) -> bool:
    return isinstance(node, Sign) or (isinstance(node, Text) and len(node.text) < 2)


def _written(node: Node, names: Mapping[str, str] | None = None) -> str:
    """Return a part as the body of a rule or a terminal.

    Args:
        names: of the names in it; None: they stay.
    """
    match node:
        case Text(text):
            return constant(text)
        case Sign(text):
            return pattern(text)
        case Name(name):
            return names[name] if names else name
        case Row(parts):
            return f"({' '.join(_written(part, names) for part in parts)})" if parts else _EMPTY
        case Choice(parts):
            return f"({' | '.join(_written(part, names) for part in parts)})"
    return _repeated(_written(node.part, names), node.least, node.most)


def _repeated(body: str, least: int, most: int | None) -> str:
    if most == 0:
        return _EMPTY
    return f"({body}){{{least},{'' if most is None else most}}}"
