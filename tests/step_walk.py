"""Reads what a model's parts run, and in which order, from their source code.

Nothing is imported: neither torch nor Triton is needed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
KINDS = {"DecodeMeta": "decode", "PrefillMeta": "prefill", "VerifyMeta": "drafts"}
CONDITIONS = {
    "last": "last layer",
    "sizes.gated": "gated attention",
    "self.shared is not None": "shared expert",
    "self.shared": "several ranks",
    "self.sharers > 1": "ranks that share a group",
    "self.up is None": "on a GPU",
    "gate": "gated attention",
    "self.drafts": "with `mtp` drafts",
    "not self.drafts": "without `mtp` drafts",
    "branch.norm is not None": "it has its own norm",
    "index < spec.media_features": "media features",
    "index < self.spec.media_features": "media features",
}
"""Conditions in the code of parts, as the page words them."""
WHOLES = {
    "layer": "[the layer's branches](#a-layer), one after the other",
    "branch.part": "the branch's token mixer or feed-forward",
}
"""Names of what computes by itself, as the page words them."""
LABELLED = {"add", "gated", "logits", "norm", "product"}
"""Methods of `Program` whose rows name the weights that they are called with."""
NORMS, PENDING = "vlm_serve.kernels.norms", "Normed"
"""The norms, and what stands for one that is still to come."""
OUTPUT, SUM = "OutputProjection", ", plus the residual"
"""The class of projections onto the residual, and the end of their rows."""


class Function(NamedTuple):
    """A function or method and the module that holds it."""

    module: str
    name: str
    node: ast.FunctionDef


class Found(NamedTuple):
    """One row of a table.

    Attributes:
        what: an op function as "module:name", or the text of a cell.
        when: the conditions under which it runs.
    """

    what: str
    when: str


class Op(NamedTuple):
    """One declaration; each implementation is "module:function" or None."""

    torch: str
    compiled: str | None
    triton: str | None


def path_of(module: str) -> Path:
    """Return a module's file."""
    base = ROOT / module.replace(".", "/")
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def file_of(module: str) -> str:
    """Return a module's file below kernels/."""
    return str(path_of(module).relative_to(ROOT / "vlm_serve" / "kernels"))


@cache
def tree(module: str) -> ast.Module:
    """Return a module's syntax tree."""
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


@cache
def imports(module: str) -> dict[str, str]:
    """Return imported names and their origins: "module:name", or "module:" for modules."""
    found = {}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vlm_serve"):
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                is_module = path_of(whole).is_file()
                origin = f"{whole}:" if is_module else f"{node.module}:{name.name}"
                found[name.asname or name.name] = origin
    return found


@cache
def definitions(module: str) -> dict[str, ast.AST]:
    """Return the functions, classes and assigned values of a module's top level."""
    found: dict[str, ast.AST] = {}
    for node in tree(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    return found


def resolve(module: str, name: str) -> tuple[str, str] | None:
    """Return where a name is defined, following imports; None if outside of vlm_serve."""
    while name not in definitions(module):
        origin = imports(module).get(name)
        if origin is None or origin.endswith(":"):
            return None
        module, name = origin.split(":")
    return module, name


def function(module: str, name: str) -> Function | None:
    """Return the function that a name means in a module."""
    place = resolve(module, name)
    node = definitions(place[0])[place[1]] if place else None
    return Function(*place, node) if place and isinstance(node, ast.FunctionDef) else None


def classes(module: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield a class and its bases, nearest first."""
    place = resolve(module, name)
    node = definitions(place[0])[place[1]] if place else None
    if place and isinstance(node, ast.ClassDef):
        yield place[0], node
        for base in node.bases:
            if isinstance(base, ast.Name):
                yield from classes(place[0], base.id)


def method(module: str, name: str, wanted: str) -> Function:
    """Return a method of a class or of its bases."""
    for place, node in classes(module, name):
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == wanted:
                return Function(place, f"{node.name}.{wanted}", each)
    raise LookupError(f"{module}:{name}.{wanted}")


def calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls below a node in their order of evaluation: arguments first."""
    for child in ast.iter_child_nodes(node):
        yield from calls(child)
    if isinstance(node, ast.Call):
        yield node


@cache
def ops(module: str) -> dict[str, Op]:
    """Return the ops that a module declares, by variable."""
    found = {}
    for name, value in definitions(module).items():
        if not isinstance(value, ast.Call) or ast.unparse(value.func) != "Op":
            continue
        named = {each.arg: each.value for each in value.keywords}
        triton = named.get("triton")
        found[name] = Op(
            _implementation(module, value.args[0]),
            _implementation(module, named["compiled"]) if "compiled" in named else None,
            None if triton is None else _text(module, triton),
        )
    return found


def _implementation(module: str, node: ast.AST) -> str:
    """Return "module:function" of `reference.rms_norm` or of a name."""
    text = ast.unparse(node)
    owner, _, name = text.rpartition(".")
    return f"{imports(module)[owner]}{name}" if owner else f"{module}:{text}"


def _text(module: str, node: ast.AST) -> str:
    """Return the value of a string, whose fields are constants of the module."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(module, each) for each in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(module, node.value)
    assert isinstance(node, ast.Name)
    return _text(module, definitions(module)[node.id])


def own_ops(where: Function, seen: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    """Return the ops that a public function runs: itself, or through other functions."""
    found: list[tuple[str, str]] = []
    for call in calls(where.node):
        if isinstance(call.func, ast.Name):
            name = call.func.id
            if name in ops(where.module):
                found.append((where.module, name))
            elif name not in seen and (inner := function(where.module, name)) is not None:
                found += own_ops(inner, seen | {name})
    return list(dict.fromkeys(found))


def reachable(module: str, name: str) -> list[Function]:
    """Return a function and what it calls in vlm_serve, by name."""
    found: list[Function] = []
    todo = [function(module, name)]
    while todo:
        each = todo.pop(0)
        if each is not None and each not in found and not _is_jit(each.node):
            found.append(each)
            names = (node.id for node in ast.walk(each.node) if isinstance(node, ast.Name))
            todo += [function(each.module, name) for name in dict.fromkeys(names)]
    return found


def _is_jit(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list)


def launched(target: str) -> list[str]:
    """Return the Triton kernels that an implementation launches, in order."""
    module, name = target.split(":")
    start = function(module, name)
    assert start is not None, f"no function {target}"
    found = _launches(start, frozenset())
    assert found, f"{target} launches nothing"
    return [
        f"`{each.name}`" + (f" (`{file_of(each.module)}`)" if each.module != start.module else "")
        for each in dict.fromkeys(found)
    ]


def _launches(where: Function, seen: frozenset[Function]) -> list[Function]:
    found: list[Function] = []
    for call in calls(where.node):
        before = [
            each
            for each in ast.walk(where.node)
            if isinstance(each, ast.Assign) and each.lineno < call.lineno
        ]
        values = {ast.unparse(each.targets[0]): each.value for each in before}
        arguments = [values.get(ast.unparse(each), each) for each in call.args]
        names = [call.func, *(each for value in arguments for each in ast.walk(value))]
        for node in names:
            each = function(where.module, node.id) if isinstance(node, ast.Name) else None
            if each is not None and _is_jit(each.node):
                found.append(each)
            elif each is not None and node is call.func and each not in seen:
                found += _launches(each, seen | {where})
    return found


def native_symbols(functions: list[Function]) -> list[str]:
    """Return the entry points of the native library that functions call."""
    found = []
    for each in functions:
        for node in ast.walk(each.node):
            if isinstance(node, ast.Constant) and str(node.value).startswith("vlm_"):
                found.append(str(node.value))
    return list(dict.fromkeys(found))


class Walk:
    """Collects rows from the methods of a class, in their order of evaluation.

    Args:
        module, owner: the class.
        rows: the rows; new ones are appended.
        label: the weights that a method of `Program` is called with.
    """

    def __init__(self, module: str, owner: str, rows: list[Found], label: str = "") -> None:
        self.module, self.owner, self.rows, self.label = module, owner, rows, label
        self._local: dict[str, str] = {}

    def method(self, name: str, when: tuple[str, ...] = ()) -> list[Found]:
        """Walk a method, under conditions; return all rows."""
        self._body(method(self.module, self.owner, name).node.body, when, set(KINDS.values()))
        return self.rows

    def _body(self, body: list[ast.stmt], when: tuple[str, ...], kinds: set[str]) -> None:
        """Walk statements. `kinds` are the kinds of slices that may arrive here."""
        for number, statement in enumerate(body):
            if isinstance(statement, ast.If):
                self._branch(statement, body[number + 1 :], when, kinds)
                return
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self._local[statement.targets[0].id] = ast.unparse(statement.value)
            if isinstance(statement, ast.For):
                self._calls(statement.iter, when)
                self._body(statement.body, when, set(kinds))
            else:
                self._calls(statement, when)

    def _branch(
        self, statement: ast.If, rest: list[ast.stmt], when: tuple[str, ...], kinds: set[str]
    ) -> None:
        """Walk both branches of a condition and what follows."""
        text, ends = ast.unparse(statement.test), isinstance(statement.body[-1], ast.Return)
        shared = re.fullmatch(r"(not )?self\.ranks\.shared", text)
        if shared:  # the page describes a single rank
            taken = statement.body if shared[1] else statement.orelse
            self._body(taken if shared[1] and ends else [*taken, *rest], when, kinds)
            return
        if found := re.fullmatch(r"isinstance\(meta, (\w+)\)", text):
            own, others = KINDS[found[1]], kinds - {KINDS[found[1]]}
            self._body(statement.body, (*when, own), {own})
            other = (*when, *others) if len(others) == 1 else when
            self._body(statement.orelse, other, others)
            self._body(rest, other if ends else when, others if ends else kinds)
            return
        self._calls(statement.test, when)
        label = CONDITIONS.get(text)
        self._body(statement.body, (*when, label) if label else when, kinds)
        self._body([*statement.orelse, *rest], when, kinds)

    def _calls(self, node: ast.AST, when: tuple[str, ...]) -> None:
        for call in calls(node):
            self._call(call, self._whole(ast.unparse(call.func)), when)

    def _call(self, call: ast.Call, text: str, when: tuple[str, ...]) -> None:
        owner, _, last = text.rpartition(".")
        if not owner:
            if text == PENDING:
                text = "rms_norm"
            found = function(NORMS if text == "rms_norm" else self.module, text)
            if found is not None and own_ops(found):
                self._add(f"{found.module}:{found.name}", when)
        elif owner in WHOLES and last in ("apply", "lower"):
            self._add(WHOLES[owner], when)
        elif re.fullmatch(r"F\.\w+", text):
            self._add(f"torch `{text}`", when)
        elif text == "self.emit" or text == "program.emit":
            self._add(f"emit:{ast.literal_eval(call.args[0])}:{self.label}", when)
        elif owner == "program":
            fields = [self._whole(ast.unparse(each)) for each in call.args]
            named = (each for each in fields if each != "self.eps")
            weights = [_field(each) for each in named if each.startswith(("self.", "branch."))]
            label = " and ".join(weights) if last in LABELLED else ""
            self._inner("vlm_serve.models.program", "Program", last, label, when)
        elif owner == "self":
            self._of_self(text, last, when)
        else:
            self._projection(call, owner, last, when)

    def _of_self(self, text: str, last: str, when: tuple[str, ...]) -> None:
        kind = self._kind(text)
        if kind == "Linear" or kind == OUTPUT:
            self._add(f"projection {_field(text)}{SUM * (kind == OUTPUT)}", when)
        elif kind is None:
            own = Walk(self.module, self.owner, self.rows, self.label)
            own.method(last, when)

    def _projection(self, call: ast.Call, owner: str, last: str, when: tuple[str, ...]) -> None:
        kind, whole = self._kind(owner), f"{owner}.{last}"
        if kind == OUTPUT and last == "lower":
            self._inner("vlm_serve.models.program", "Program", "add", _field(owner), when)
        elif kind == "Linear" and last == "of_norm":
            gated = any(keyword.arg == "gated" for keyword in call.keywords)
            end = " with that of `up`, then `silu_times`" if gated else ""
            self._add(f"projection {_field(owner)}{end}", when)
        elif kind == "LoadedMlp" and last == "hidden":
            self._add(f"{_field(owner)} as an MLP", when)
        elif kind == "Linear" and last == "gated":
            up = _field(self._whole(ast.unparse(call.args[0])))
            self._add(f"projections {_field(owner)} and {up}, then `silu_times`", when)
        elif self._kind(whole) == OUTPUT:
            self._add(f"projection {_field(whole)}{SUM}", when)
        elif self._kind(whole) == "Linear":
            self._add(f"projection {_field(whole)}", when)

    def _inner(self, module: str, owner: str, name: str, label: str, when: tuple[str, ...]) -> None:
        if any(each.name == name for each in _methods(module, owner)):
            Walk(module, owner, self.rows, label or self.label).method(name, when)

    def _add(self, what: str, when: tuple[str, ...]) -> None:
        row = Found(what, ", ".join(dict.fromkeys(when)))
        if self.rows[-1:] != [row]:
            self.rows.append(row)

    def _whole(self, text: str) -> str:
        """Return an expression with a local name replaced by what it was assigned."""
        first, dot, rest = text.partition(".")
        value = self._local.get(first, "")
        return f"{value}{dot}{rest}" if re.fullmatch(r"self(\.\w+)+", value) else text

    def _kind(self, chain: str) -> str | None:
        """Return the class of an expression such as `self.shared.down`, by annotations."""
        module, owner = self.module, self.owner
        for name in chain.split(".")[1:]:
            found = _attribute(module, owner, name)
            if found is None:
                return None
            module, owner = found
        return owner if chain.startswith("self.") else None


def _methods(module: str, owner: str) -> list[ast.FunctionDef]:
    return [
        each
        for _, node in classes(module, owner)
        for each in node.body
        if isinstance(each, ast.FunctionDef)
    ]


def _attribute(module: str, owner: str, name: str) -> tuple[str, str] | None:
    """Return the class of an attribute: its annotation's, or that of an assigned call."""
    for place, node in classes(module, owner):
        for each in ast.walk(node):
            target: ast.expr
            if isinstance(each, ast.AnnAssign):
                target, kind = each.target, each.annotation
            elif isinstance(each, ast.Assign) and isinstance(each.value, ast.Call):
                target, kind = each.targets[0], each.value.func
            else:
                continue
            if ast.unparse(target).removeprefix("self.") == name:
                return resolve(place, ast.unparse(kind).removesuffix(" | None"))
    return None


def _field(chain: str) -> str:
    """Return an attribute as the page names it."""
    for head in ("self._decoder.", "self._", "self.", "branch."):
        chain = chain.removeprefix(head)
    return f"`{chain.removesuffix('.weight')}`"
