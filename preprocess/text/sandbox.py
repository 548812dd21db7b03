"""Jinja's sandbox with limits of time and memory: a template is anybody's file.

Jinja checks neither between two pieces of text. Here loops and operations check the deadline, and
what they make counts against a limit, before it is made where it could be much larger than what
is there already.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 1 << 18
"""Characters of a template, many times more than any published one has."""
MAX_CHARACTERS = 1 << 28
"""What one rendering may make: some copies of the largest prompt."""
_AT_ONCE = 1 << 25
"""Characters that one operation may make."""
_MAX_BITS = 1 << 14
"""Bits of a whole number."""
_ENTRY = 64
"""Characters that an entry of a container counts for, and a turn of a loop."""
_TURNS = 16
"""A loop looks at its first turn, and at each so many."""
_TEXTS = (str, bytes)
_ONCE = dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes", "truncate", "xmlattr"), 1)
_FORMATS = ("%", "format", "format_map")
_PLACES: dict[str, Callable[[Any, tuple[Any, ...]], int]] = {
    **{name: lambda value, rest: 1 for name in _ONCE},
    **{name: lambda value, rest: _ENTRY for name in ("batch", "slice")},
    **{name: lambda value, rest: value.count("%") + value.count("{") for name in _FORMATS},
    **{name: lambda value, rest: len(value) for name in ("translate", "urlize", "wordwrap")},
    "expandtabs": lambda value, rest: value.count("\t"),
    "indent": lambda value, rest: value.count("\n") + 1,
    "join": lambda value, rest: len(value),
    "replace": lambda value, rest: value.count(rest[0]) if rest and rest[0] else len(value) + 1,
    "round": lambda value, rest: 1 << 12,
    "tojson": lambda value, rest: _size(value) // 8,
}
"""How often filters, methods and `%` may write what they get beside a value."""
_AS_IT_IS = frozenset({"batch", "join", "slice", "tojson"})
"""Filters that make no text of their value first."""
_QUIET = frozenset(
    {
        *("abs", "attr", "count", "d", "default", "dictsort", "filesizeformat", "first", "float"),
        *("groupby", "int", "items", "last", "length", "list", "map", "max", "min", "random"),
        *("reject", "rejectattr", "reverse", "select", "selectattr", "sort", "sum", "unique"),
        *("for", "[:]"),
    }
)
"""Filters that write no text of a container."""

_SAFE = {
    str: {name for name in dir(str) if name[0] != "_"} - {"format", "format_map"},
    jinja2.runtime.LoopContext: {"index", "index0", "first", "last", "length", "previtem"},
}
"""Attributes that the sandbox permits, without asking it each time."""


class TooSlowError(Exception):
    """Rendering passed its deadline. Not a TemplateError, so no template can swallow it."""


class TooMuchError(jinja2.TemplateError):
    """Rendering makes too much."""


class _Rendering(threading.local):
    """A thread's rendering: when it must end, and what it may still make."""

    deadline = float("inf")
    left = MAX_CHARACTERS


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Counts what templates make, and checks the deadline."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, **options: Any) -> None:
        def shown(value: Any) -> Any:
            if type(value) is not str:
                self._foresee("an output", value, ())
            return value

        super().__init__(**options, finalize=shown)
        self._rendering = _Rendering()
        del self.globals["lipsum"]
        self.filters |= {"for": self._each, "[:]": _slice, "~": _text}

    def set_deadline(self, deadline: float) -> None:
        """Begin a rendering on this thread."""
        self._rendering.deadline, self._rendering.left = deadline, MAX_CHARACTERS

    def check_deadline(self) -> None:
        """Raise TooSlowError behind the deadline."""
        if time.monotonic() > self._rendering.deadline:
            raise TooSlowError

    def _spend(self, size: int) -> None:
        left = self._rendering.left - max(0, size)
        if left < 0:
            raise TooMuchError(
                f"it makes more than {MAX_CHARACTERS >> 20} Mi characters on its way"
            )
        self._rendering.left = left

    def _made(self, value: Any) -> Any:
        """Count a value that was made, and return it."""
        if isinstance(value, _TEXTS):
            self._spend(len(value))
        elif isinstance(value, list | tuple | dict):
            self._spend(_ENTRY * len(value))
        return value

    def _foresee(self, name: str, value: Any, rest: tuple[Any, ...]) -> None:
        """Raise TemplateError if an operation would make too much at once."""
        size = _size((value, *rest))
        if rest and name in _PLACES:
            formats = name in _FORMATS
            numbers = not formats or "*" in value or re.search(r":[^{}]*\{", value) is not None
            given = rest[0] if formats and rest and isinstance(rest[0], tuple) else rest
            most = max((_width(each, numbers=numbers) for each in given), default=0)
            if formats:
                most += max((int(run[:12]) for run in re.findall(r"\d+", value)), default=0)
            size += _PLACES[name](value, rest) * most
        if size > _AT_ONCE:
            raise TooMuchError(f"{name} would write over {_AT_ONCE >> 20} Mi characters")

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and not hasattr(dict, attribute):
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if attribute in _SAFE.get(type(obj), ()):
            return getattr(obj, attribute)
        if isinstance(obj, jinja2.utils.Namespace) and attribute[:1] != "_":
            with contextlib.suppress(AttributeError):
                return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_deadline()
        if getattr(obj, "__name__", "") in _PLACES:
            method = getattr(obj, "__wrapped__", obj)  # jinja wraps str.format.
            own, name = getattr(method, "__self__", None), method.__name__
            value, rest = own, (*args, *kwargs.values())
            if name == "join" and args:
                args = _listed(args)
                value, rest = args[0], (own,)
            if isinstance(own, (*_TEXTS, int)):
                self._foresee(name, value, rest)
        return self._made(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            return self._made(left + right)
        if operator == "%" and isinstance(left, _TEXTS):
            self._foresee("%", left, (right,))
        elif operator == "*":
            for one, other in (left, right), (right, left):
                if isinstance(one, int) and isinstance(other, (*_TEXTS, list, tuple)):
                    self._spend(one * len(other) * (8 if isinstance(other, list | tuple) else 1))
        bits = [each.bit_length() for each in (left, right) if isinstance(each, int)]
        if len(bits) == 2 and operator != "%":
            power = operator == "**" and right > 0
            if (bits[0] * right if power else sum(bits)) > _MAX_BITS:
                raise TooMuchError(f"{operator} would make too large a number")
        return self._made(super().call_binop(context, operator, left, right))

    def concat(self, pieces: Iterable[str]) -> str:
        """Join what a block or a macro has written."""
        parts = list(pieces)
        self._spend(sum(map(len, parts)))
        return "".join(parts)

    def parse(self, source: str, *args: Any, **options: Any) -> nodes.Template:
        with _compiling(source):
            return super().parse(source, *args, **options)

    def from_string(self, source: str | nodes.Template, *args: Any, **options: Any) -> Any:
        with _compiling(source):
            return super().from_string(source, *args, **options)

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        for name, work in self.filters.items():
            if not hasattr(work, "is_counted"):
                self.filters[name] = self._counted(name, work)
        tree = _Counted().visit(source).set_environment(self)
        return super()._generate(tree, *args, **options)

    def _each(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the values of a loop, and count its turns."""
        for turn, value in enumerate(values):
            if turn % _TURNS == 0:
                self.check_deadline()
                self._spend(_TURNS * _ENTRY)
            yield value

    def _counted(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that is counted."""
        skipped = int(hasattr(work, "jinja_pass_arg"))
        quiet, growing = name in _QUIET, name in _PLACES

        @functools.wraps(work)
        def counted(*args: Any, **kwargs: Any) -> Any:
            value = args[skipped]
            if quiet or (type(value) is str and not growing):
                return self._made(work(*args, **kwargs))
            self.check_deadline()
            given = _listed(args[skipped:]) if name == "join" else args[skipped:]
            value, rest = given[0], (*given[1:], *kwargs.values())
            if growing and name not in _AS_IT_IS and not isinstance(value, str):
                self._foresee("an output", value, ())
                value = str(value)
            self._foresee(name, value, rest)
            return self._made(work(*args[:skipped], *given, **kwargs))

        counted.is_counted = True  # type: ignore[attr-defined]
        return counted


class _Counted(NodeTransformer):
    """Makes filters of what jinja runs by itself: loops, slices and joined texts."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "for")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "~")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter(node.node, "[:]", *(end or nodes.Const(None) for end in ends))


def _filter(node: nodes.Node, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


def _slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    return value[start:stop:step]


def _text(parts: tuple[Any, ...]) -> str:
    return "".join(map(str, parts))


def _listed(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of `join`, with a list in place of what can be read once."""
    if arguments and not hasattr(arguments[0], "__len__"):
        return (list(arguments[0]), *arguments[1:])
    return arguments


def _width(value: Any, *, numbers: bool) -> int:
    """Return what a place may get of an argument: its text, or as many characters as it says."""
    return abs(value) if numbers and isinstance(value, int) else _size(value)


def _size(value: Any) -> int:
    """Return the characters that the text of a value has, about; not all, if it is too long."""
    total, left = 0, [value]
    while left and total <= _AT_ONCE:
        one = left.pop()
        if isinstance(one, _TEXTS):
            total += len(one)
            continue
        total += _ENTRY
        if isinstance(one, jinja2.utils.Namespace):
            one = vars(one)
        if isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            left += one
    return total


@contextlib.contextmanager
def _compiling(source: object) -> Iterator[None]:
    """Turn what Python says about a template into a TemplateError."""
    if isinstance(source, str) and len(source) > MAX_SOURCE:
        raise jinja2.TemplateError(f"it has {len(source)} characters, more than {MAX_SOURCE}")
    try:
        yield
    except RecursionError:
        raise jinja2.TemplateError("it is nested too deeply") from None
    except (MemoryError, OverflowError, SyntaxError, ValueError) as error:
        problem = f"Python cannot compile it ({type(error).__name__})"
        raise jinja2.TemplateError(problem) from None
