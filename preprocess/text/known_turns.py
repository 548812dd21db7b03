"""Remembers what a chat template wrote for each message, where its syntax tree allows it.

A turn of the loop over the messages writes a text that follows from the message and from what its
body reads besides: attributes of the loop, variables, counters in namespaces. Parts of its
expressions that depend on no name set inside, such as `loop.index0 > ns.last_query_index`, are
evaluated first; with their values and the message's digest the text is known. The loop is rewritten
accordingly. A template with anything else in the loop is left as it is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, cast

import jinja2
import jinja2.compiler
from blake3 import blake3
from jinja2 import nodes

from vlm_serve.preprocess.identity.keys import hasher_of
from vlm_serve.preprocess.sized_index import SizedIndex

FIND, KEEP = "_vlm_serve_find_turn", "_vlm_serve_keep_turn"
"""Variables with the functions of a `Turns`; no request may set them."""
_TURN, _TEXT = "_vlm_serve_turn", "_vlm_serve_text"
_DOMAIN = b"vlm-serve known turn 1"
# Memory of an entry without its text: measured, rounded up.
_ENTRY_BYTES = 768
_STATEMENTS = (nodes.Output, nodes.If, nodes.For, nodes.Assign, nodes.AssignBlock, nodes.Scope)
LOOP = frozenset({"index", "index0", "first", "last", "length", "previtem", "nextitem"})
"""Attributes of a loop that have no effects."""
_PURE_FILTERS = frozenset({"length", "count", "trim", "lower", "upper", "default", "d", "string"})
_FUNCTIONS = frozenset({"raise_exception", "namespace", "range"})
# Cheap, and without effects, in the parts that are evaluated first.
_PURE = (
    nodes.Name, nodes.Const, nodes.Getattr, nodes.Getitem, nodes.Compare, nodes.Operand, nodes.Not,
    nodes.And, nodes.Or, nodes.Test, nodes.Add, nodes.Sub, nodes.Slice, nodes.CondExpr, nodes.Neg,
)  # fmt: skip

_dumped = json.JSONEncoder(ensure_ascii=False).encode


def _content(message: Any) -> str:
    """Return a text that only an equal message has."""
    if type(message) is dict and [*message] == ["role", "content"]:
        role, content = message.values()
        if type(content) is str and type(role) is str:
            return f"{len(role)} {role}{content}"
    return _dumped(message)


_FAILURES = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
)  # fmt: skip
"""What an expression may raise that the template itself would not have reached."""


class _NoValue:
    """What has none: it fails, or is not defined."""


_FAILS, _UNDEFINED = _NoValue(), _NoValue()
_PLAIN = frozenset({int, float, bool, str, type(None), _NoValue})

Written = tuple[str, str]
"""A namespace outside of the loop and one of its attributes."""


class _Unknown(Exception):
    """The loop has something whose effects are not known."""


class TurnCompiler(jinja2.compiler.CodeGenerator):
    """Compiles rewritten templates. What is read ahead may fail, so it becomes a function; nobody
    sees its values but a `Turns`."""

    _ahead = False

    def visit_MarkSafeIfAutoescape(
        self, node: nodes.MarkSafeIfAutoescape, frame: jinja2.compiler.Frame
    ) -> None:
        """Write an expression that is read ahead; no other template contains this node."""
        self._ahead = True
        self.write("(" if _is_certain(node.expr) else "(lambda: ")
        self.visit(node.expr, frame)
        self.write(")")
        self._ahead = False

    def visit_Getattr(self, node: nodes.Getattr, frame: jinja2.compiler.Frame) -> None:
        """Write an attribute of the loop that is read ahead directly."""
        if not (self._ahead and _is_of_loop(node)):
            super().visit_Getattr(node, frame)
            return
        self.visit(node.node, frame)
        self.write(f".{node.attr}")

    def visit_Call(
        self, node: nodes.Call, frame: jinja2.compiler.Frame, forward_caller: bool = False
    ) -> None:
        """Call our own functions directly."""
        if not isinstance(node.node, nodes.Name) or node.node.name not in (FIND, KEEP):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.visit(node.node, frame)
        self.write("(")
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")


def _is_of_loop(node: nodes.Node) -> bool:
    if not isinstance(node, nodes.Getattr) or not isinstance(node.node, nodes.Name):
        return False
    return node.node.name == "loop" and node.attr in LOOP


def _is_certain(node: nodes.Node) -> bool:
    """Return True if reading an expression cannot fail."""
    if isinstance(node, nodes.Not | nodes.And | nodes.Or):
        return all(map(_is_certain, node.iter_child_nodes()))
    return isinstance(node, nodes.Name) or _is_of_loop(node)


def rewrite(tree: nodes.Template) -> bool:
    """Rewrite the loop over the messages, if it is of a known form; return whether it was."""
    loops = [
        node
        for node in tree.body
        if isinstance(node, nodes.For)
        and isinstance(node.iter, nodes.Name)
        and node.iter.name == "messages"
        and node.find(nodes.Output) is not None
    ]
    if len(loops) != 1 or any(name.name == "messages" for name in _stored(tree)):
        return False
    (loop,) = loops
    try:
        reads, written = _Body(tree, loop).effects()
    except _Unknown:
        return False
    loop.body = _rewritten(loop, reads, written)
    assert tree.environment is not None
    tree.set_environment(tree.environment)
    return True


def _stored(node: nodes.Node) -> Iterator[nodes.Name]:
    return (name for name in node.find_all(nodes.Name) if name.ctx == "store")


def _rewritten(
    loop: nodes.For, reads: Sequence[nodes.Expr], written: Sequence[Written]
) -> list[nodes.Node]:
    """Return the loop's new body: find the turn, or else write it and keep it."""
    attributes = [nodes.Getattr(nodes.Name(n, "load"), a, "load") for n, a in written]
    ahead = [nodes.MarkSafeIfAutoescape(read) for read in (*attributes, *reads)]
    assert isinstance(loop.target, nodes.Name)
    message = nodes.Name(loop.target.name, "load")
    seen = nodes.Tuple(list[nodes.Expr](ahead), "load")
    find = _call(FIND, message, seen)
    turn = nodes.Name(_TURN, "load")
    after = nodes.Tuple(list[nodes.Expr](attributes), "load")
    keep = _call(KEEP, nodes.Name(_TEXT, "load"), after)
    restored: list[nodes.Node] = [
        nodes.Assign(nodes.NSRef(name, attribute), _item(turn, index + 2))
        for index, (name, attribute) in enumerate(written)
    ]
    write = [
        nodes.AssignBlock(nodes.Name(_TEXT, "store"), None, loop.body),
        nodes.Output([keep]),
    ]
    return [
        nodes.Assign(nodes.Name(_TURN, "store"), find),
        nodes.If(turn, [nodes.Output([_item(turn, 1)]), *restored], [], write),
    ]


def _call(function: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.Name(function, "load"), list(arguments), [], None, None)


def _item(turn: nodes.Expr, index: int) -> nodes.Getitem:
    return nodes.Getitem(turn, nodes.Const(index), "load")


class _Body:
    """What the body of a loop reads and writes beyond its own names.

    Args:
        tree: the template.
        loop: the loop, at its top level.
    """

    def __init__(self, tree: nodes.Template, loop: nodes.For) -> None:
        self._loop = loop
        self._macros = {node.name: node for node in tree.body if isinstance(node, nodes.Macro)}
        self._namespaces = {
            given.target.name
            for given in tree.find_all(nodes.Assign)
            if isinstance(given.target, nodes.Name) and _is_namespace(given.node)
        }
        # Namespaces are reached by their own names alone.
        direct = {id(each.node) for each in tree.find_all(nodes.Getattr)}
        direct |= {id(each.node) for each in tree.find_all(nodes.Getitem)}
        for name in tree.find_all(nodes.Name):
            if name.name in self._namespaces and name.ctx == "load" and id(name) not in direct:
                raise _Unknown
        self._reads: list[nodes.Expr] = []
        self._entered: set[str] = set()
        self._own = frozenset(name.name for name in _stored(loop))
        self._written: frozenset[Written] = frozenset()

    def effects(self) -> tuple[list[nodes.Expr], list[Written]]:
        """Return the expressions that the body reads, and the attributes that it writes.

        Raises _Unknown for anything else.
        """
        loop = self._loop
        if not isinstance(loop.target, nodes.Name) or loop.test is not None:
            raise _Unknown
        if loop.recursive or loop.else_:
            raise _Unknown
        # First everything that is written, which no expression may read ahead.
        self._written = frozenset(self._find_written(loop.body, self._own, set()))
        if any(name not in self._namespaces for name, _ in self._written):
            raise _Unknown
        self._statements(loop.body, _Scope(self._own, {loop.target.name}, "turns"))
        return self._reads, sorted(self._written)

    def _find_written(
        self, body: Sequence[nodes.Node], own: frozenset[str], entered: set[str]
    ) -> Iterator[Written]:
        for node in body:
            refs = [node] if isinstance(node, nodes.NSRef) else node.find_all(nodes.NSRef)
            yield from ((ref.name, ref.attr) for ref in refs if ref.name not in own)
            for call in node.find_all(nodes.Call):
                macro = self._macros.get(getattr(call.node, "name", ""))
                if macro is not None and macro.name not in entered:
                    entered.add(macro.name)
                    yield from self._find_written(macro.body, _own_names(macro), entered)

    def _statements(self, body: Sequence[nodes.Node], scope: _Scope) -> None:
        for node in body:
            if isinstance(node, nodes.Break | nodes.Continue) and scope.loop == "inner":
                continue
            if not isinstance(node, _STATEMENTS):
                raise _Unknown
            self._statement(node, scope)

    def _statement(self, node: nodes.Node, scope: _Scope) -> None:
        if isinstance(node, nodes.If):
            self._expression(node.test, scope)
            branches = [scope.copy() for _ in range(2 + len(node.elif_))]
            self._statements(node.body, branches[0])
            for other, branch in zip(node.elif_, branches[1:], strict=False):
                self._statement(other, branch)
            self._statements(node.else_, branches[-1])
            scope.assigned.update(set.intersection(*(branch.assigned for branch in branches)))
        elif isinstance(node, nodes.For):
            if node.recursive or node.test is not None:
                raise _Unknown
            self._expression(node.iter, scope)
            targets = [node.target] if isinstance(node.target, nodes.Name) else _stored(node.target)
            inner = scope.copy("inner")
            inner.assigned.update(target.name for target in targets)
            self._statements(node.body, inner)
            self._statements(node.else_, scope.copy())
        elif isinstance(node, nodes.Assign):
            self._expression(node.node, scope)
            self._assign(node.target, scope)
        elif isinstance(node, nodes.AssignBlock):
            if node.filter is not None:
                raise _Unknown
            self._statements(node.body, scope.copy())
            self._assign(node.target, scope)
        elif isinstance(node, nodes.Scope):
            self._statements(node.body, scope.copy())
        else:
            for child in node.iter_child_nodes():
                self._expression(child, scope)

    def _assign(self, target: nodes.Node, scope: _Scope) -> None:
        if isinstance(target, nodes.NSRef):
            scope.check(target.name)
            return
        names = [target] if isinstance(target, nodes.Name) else _stored(target)
        scope.assigned.update(name.name for name in names)

    def _expression(self, node: nodes.Node, scope: _Scope) -> None:
        """Note the largest parts of an expression that can be read before the body runs."""
        if isinstance(node, nodes.TemplateData | nodes.Const):
            return
        alone = isinstance(node, nodes.Expr) and not isinstance(node, nodes.Slice)
        if alone and self._is_readable(node, scope):
            named = isinstance(node, nodes.Name) or node.find(nodes.Name) is not None
            if named and node not in self._reads:
                self._reads.append(cast("nodes.Expr", node))
            return
        if isinstance(node, nodes.Name):
            scope.check(node.name)
            return
        if isinstance(node, nodes.Getattr) and self._written_base(node) is not None:
            return
        if isinstance(node, nodes.Filter) and node.name == "random":
            raise _Unknown
        children = list(node.iter_child_nodes())
        if isinstance(node, nodes.Call):
            children.remove(node.node)
            self._function(node.node, scope)
        for child in children:
            self._expression(child, scope)

    def _function(self, function: nodes.Node, scope: _Scope) -> None:
        """Go through what is called: a method, one of a few functions, or a macro."""
        if isinstance(function, nodes.Getattr):
            # Of texts, lists and mappings: the sandbox allows none that changes them.
            self._expression(function.node, scope)
            return
        if not isinstance(function, nodes.Name) or function.name in scope.own:
            raise _Unknown
        macro = self._macros.get(function.name)
        if macro is None:
            if function.name not in _FUNCTIONS:
                raise _Unknown
        elif macro.name not in self._entered:
            self._entered.add(macro.name)
            own = _own_names(macro)
            names = {name.name for name in macro.find_all(nodes.Name)}
            # A name of the body is another one inside of the macro.
            if names & {"caller", "varargs", "kwargs", "self"} or (names - own) & self._own:
                raise _Unknown
            inside = _Scope(own, {argument.name for argument in macro.args}, "none")
            for default in macro.defaults:
                self._expression(default, inside)
            self._statements(macro.body, inside)

    def _written_base(self, node: nodes.Getattr) -> str | None:
        """Return the namespace whose attribute this is, if the loop writes that attribute."""
        name = node.node.name if isinstance(node.node, nodes.Name) else ""
        return name if (name, node.attr) in self._written else None

    def _is_readable(self, node: nodes.Node, scope: _Scope) -> bool:
        """Return True if an expression can be evaluated before the body, with the same value."""
        if isinstance(node, nodes.Name):
            taken = {"loop", *scope.own, *self._macros, *self._namespaces}
            return node.name not in taken
        if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
            name = node.node.name
            if name == "loop":
                return scope.loop == "turns" and node.attr in LOOP
            if name in self._namespaces and name not in scope.own:
                return self._written_base(node) is None
        pure = isinstance(node, _PURE) or (
            isinstance(node, nodes.Filter) and node.name in _PURE_FILTERS
        )
        return pure and all(self._is_readable(child, scope) for child in node.iter_child_nodes())


class _Scope:
    """The names of a body or a macro.

    Args:
        own: names that it sets anywhere.
        assigned: those that are set at the present place, however it was reached.
        loop: whose `loop` there is: that of the turns, of a loop inside, or none.
    """

    def __init__(self, own: frozenset[str], assigned: set[str], loop: str) -> None:
        self.own, self.assigned, self.loop = own, assigned, loop

    def copy(self, loop: str | None = None) -> _Scope:
        """Return the scope of a branch, or of a loop inside."""
        return _Scope(self.own, set(self.assigned), loop or self.loop)

    def check(self, name: str) -> None:
        """Raise _Unknown unless a name has a value that the body has set, or the template."""
        inside = self.loop == "inner" if name == "loop" else name in self.assigned
        if not inside and (name == "loop" or name in self.own):
            raise _Unknown


def _own_names(macro: nodes.Macro) -> frozenset[str]:
    return frozenset(name.name for name in [*macro.args, *_stored(macro)])


def _is_namespace(node: nodes.Node) -> bool:
    called = node.node if isinstance(node, nodes.Call) else None
    return isinstance(called, nodes.Name) and called.name == "namespace"


Kept = tuple[Any, ...]
"""All that a turn follows from, its text, and the attributes that it wrote."""


def _cost(kept: Kept) -> int:
    texts = [*kept[0], *kept[1:]]
    return _ENTRY_BYTES + sum(sys.getsizeof(text) for text in texts if isinstance(text, str))


class KnownTurns(SizedIndex[Kept]):
    """Texts of messages by all that they follow from.

    Args:
        max_bytes: limit on what is kept; 0: nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, _cost)
        self._secret = os.urandom(32)

    def of(self, cache_salt: str) -> Turns:
        """Return a tenant's turns, for one request."""
        return Turns(self, hasher_of(_DOMAIN, secret=self._secret, salt=cache_salt).digest())


class Turns:
    """Finds and keeps the turns of one request's renderings.

    Args:
        known: all known turns.
        key: of the tenant.
    """

    def __init__(self, known: KnownTurns, key: bytes) -> None:
        self._known, self._tenant = known, key
        self._digests: dict[int, tuple[Any, bytes]] = {}  # with the messages, so that they stay
        self._key: tuple[Any, ...] | None = None

    @property
    def variables(self) -> dict[str, Callable[..., Any]]:
        """The functions that a rewritten template calls."""
        return {FIND: self.find, KEEP: self.keep}

    def find(self, message: Any, seen: Sequence[Any]) -> Kept | None:
        """Return what is kept of a turn; None: it must be written.

        Args:
            seen: what the body reads: values, and functions that return one.
        """
        self._key = None
        values: list[Any] = []
        for value in seen:
            if type(value) is FunctionType:
                try:
                    value = value()
                except _FAILURES:
                    value = _FAILS
            if type(value) not in _PLAIN:
                if not isinstance(value, jinja2.Undefined):
                    return None
                value = _UNDEFINED
            values.append(value)
        # True equals 1, so the types belong to the key.
        self._key = (self._digest(message), *values, *map(type, values))
        return self._known.get(self._key)

    def _digest(self, message: Any) -> bytes:
        known = self._digests.get(id(message))
        if known is None:
            content = _content(message).encode("utf-8", "surrogatepass")
            known = message, blake3(content, key=self._tenant).digest()
            self._digests[id(message)] = known
        return known[1]

    def keep(self, text: str, written: Sequence[Any]) -> str:
        """Keep the turn that was not found, and return its text."""
        plain = all(type(value) in _PLAIN for value in written)
        if self._key is not None and plain:
            self._known.put(self._key, (self._key, str(text), *written))
        return text
