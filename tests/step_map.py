"""Writes the generated part of docs/step.md: what computes a step, op by op.

    .venv/bin/python tests/step_map.py

The rows come from the `Op` declarations of the packages in kernels/, from the methods `apply` and
`lower` of the model's parts (`step_walk`) and from the native sources (`native_sources`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from native_sources import defined_at, native_body, native_path, native_sources, operation
from step_walk import (
    Found,
    Walk,
    calls,
    classes,
    definitions,
    file_of,
    function,
    launched,
    method,
    native_symbols,
    ops,
    own_ops,
    path_of,
    reachable,
    tree,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "step.md"
BEGIN, END = "<!-- begin: tests/step_map.py -->", "<!-- end: tests/step_map.py -->"
PACKAGE = "vlm_serve."
TORCH_PRODUCTS = {"F.linear", "torch.addmm", "torch.mm"}
PARTS = (
    ("The model around its layers", "vlm_serve.models.model", "Model", "_by_ops", "compile_steps"),
    ("A layer", "vlm_serve.models.decoder", "Layer", "apply", "lower"),
    (
        "Token mixer: Gated DeltaNet",
        "vlm_serve.models.parts.gated_delta",
        "LoadedGatedDelta",
        "apply",
        "lower",
    ),
    (
        "Token mixer: short convolution",
        "vlm_serve.models.parts.short_conv",
        "LoadedShortConv",
        "apply",
        "lower",
    ),
    (
        "Token mixer: Mamba2",
        "vlm_serve.models.parts.mamba2",
        "LoadedMamba2",
        "apply",
        "lower",
    ),
    (
        "Token mixer: attention",
        "vlm_serve.models.parts.attention",
        "LoadedAttention",
        "apply",
        "lower",
    ),
    (
        "Feed-forward: MLP",
        "vlm_serve.models.parts.feed_forward",
        "LoadedMlp",
        "apply",
        "lower",
    ),
    (
        "Feed-forward: MLP without a gate",
        "vlm_serve.models.parts.feed_forward",
        "LoadedUngatedMlp",
        "apply",
        "lower",
    ),
    (
        "Feed-forward: routed experts",
        "vlm_serve.models.parts.feed_forward",
        "LoadedExperts",
        "apply",
        "lower",
    ),
)
"""Title, module, class, its method by ops, its method for the compiled step."""

SAMPLING = (
    ("sample", "the loop over a step's tasks"),
    ("_best", "greedy rows, unless the compiled step has found the largest logits already"),
    ("SequenceSampler.choose", "the mask of a grammar"),
    ("SequenceSampler._changed", "`logit_bias` and penalties"),
    ("SequenceSampler._draw", "`temperature`, `top_k`, `top_p`, `min_p` and the draw"),
    ("SequenceSampler._reported", "log-probabilities"),
)
"""Functions of engine/steps/sampler.py and what they are for."""
BEST = "find_argmax"
"""The native function that finds the largest logits of a compiled step."""
SAMPLER = "vlm_serve.engine.steps.sampler"
PREPARING = {"tensor", "stack", "from_numpy", "zeros_like", "ones_like"}
"""torch functions that only prepare tensors."""
LINEAR = "vlm_serve.kernels.linear"


def table(head: str, rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    columns = head.split(" | ")
    lines = [columns, ["---"] * len(columns), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def op_row(module: str, name: str) -> tuple[str, str, str, str]:
    """Return an op's cells: compiled on a CPU, torch on a CPU, on a GPU, kernels launched."""
    op = ops(module)[name]
    compiled, torch = "-", _target(op.torch)
    if op.compiled is not None:
        symbols = native_symbols(reachable(*op.compiled.split(":")))
        compiled = ", ".join(f"`{each}` (`{defined_at(each)}`)" for each in symbols)
    if op.torch.endswith("by_ops"):
        compiled = torch = "its ops, one by one"
    gpu = "torch, as on a CPU" if op.triton is None else _target(op.triton)
    kernels = "-" if op.triton is None else ", ".join(launched(op.triton))
    return compiled, torch, gpu, kernels


def _target(target: str) -> str:
    module, name = target.split(":")
    assert function(module, name) is not None, f"no function {target}"
    return f"`{file_of(module)}:{name}`"


def by_ops(found: list[Found]) -> str:
    """Return the table of a part that runs op by op."""
    rows: list[tuple[str, ...]] = []
    for each in found:
        if not each.what.startswith(PACKAGE):
            link = "[projections](#projections)" if each.what.startswith("projection") else ""
            rows.append((each.what, each.when, link, "", "", ""))
            continue
        where = function(*each.what.split(":"))
        assert where is not None
        for module, name in own_ops(where):
            rows.append((f"`{where.name}`", each.when, *op_row(module, name)))
    return table("op | when | CPU, compiled | CPU, torch | GPU | Triton kernels", rows)


def compiled_step(found: list[Found]) -> str:
    """Return the table of a part's operations in the compiled step."""
    rows: list[tuple[str, ...]] = []
    for each in found:
        if not each.what.startswith("emit:"):
            rows.append((each.what, each.when, "", ""))
            continue
        _, name, label = each.what.split(":")
        file, runs = operation(name)
        title = f"`{name}`" + (f" of {label}" if label else "")
        rows.append((title, each.when, f"`{file}`", runs or "-"))
    return table("operation | when | `perform` in | native functions", rows)


def projections() -> str:
    """Return the table of the classes that own a weight."""
    rows: list[tuple[str, ...]] = []
    for path in sorted((ROOT / "kernels" / "linear").glob("*.py")):
        module = f"{LINEAR}.{path.stem}"
        own = [name for name, node in definitions(module).items() if isinstance(node, ast.ClassDef)]
        for name in own:
            bases = [each.name for _, each in classes(module, name)][1:]
            if "Linear" not in bases or any(_has_subclass(name)):
                continue
            call = method(module, name, "__call__")
            native = native_symbols([call])
            cpu = ", ".join(f"`{each}` (`{defined_at(each)}`)" for each in native)
            torch = [each for each in _torch(tree(module)) if each in TORCH_PRODUCTS]
            gpu = "-" if native else _listed(torch)
            targets = [op.triton for op in ops(module).values() if op.triton is not None]
            if targets:
                gpu = "; ".join(f"{_target(each)}: {', '.join(launched(each))}" for each in targets)
            if name == "Joined":
                cpu = gpu = "its parts side by side"
            rows.append((f"`{name}`", f"`linear/{path.name}`", cpu or _listed(torch), gpu))
    return table("weight | file | CPU | GPU", rows)


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{each}`" for each in names)


def _has_subclass(name: str) -> Iterator[bool]:
    for path in (ROOT / "kernels" / "linear").glob("*.py"):
        for node in definitions(f"{LINEAR}.{path.stem}").values():
            if isinstance(node, ast.ClassDef):
                yield name in map(ast.unparse, node.bases)


def _torch(node: ast.AST) -> list[str]:
    """Return the functions of torch that are called below a node, in order."""
    names = dict.fromkeys(ast.unparse(each.func) for each in calls(node))
    return [name for name in names if re.fullmatch(r"(torch|F)\.\w+", name)]


def sampling() -> str:
    """Return the table of the sampler's functions."""
    rows: list[tuple[str, ...]] = []
    for name, purpose in SAMPLING:
        owner, _, last = name.rpartition(".")
        where = method(SAMPLER, owner, last) if owner else function(SAMPLER, last)
        assert where is not None, name
        used = [each for each in _torch(where.node) if each.split(".")[1] not in PREPARING]
        rows.append((f"`{name}`", purpose, _listed(used) or "-"))
    file = next(
        native_path(path)
        for path, text in native_sources().items()
        if native_body(text, rf"void {BEST}\(") is not None
    )
    rows.append((f"`{BEST}`", "greedy rows of the compiled step", f"none: `{file}`"))
    return table("function | for | torch functions", rows)


def others(seen: set[tuple[str, str]]) -> str:
    """Return the table of the ops that no part of the page has named yet."""
    rows: list[tuple[str, ...]] = []
    for path in sorted((ROOT / "kernels").glob("*/__init__.py")):
        module = f"{PACKAGE}kernels.{path.parent.name}"
        for name in definitions(module):
            where = function(module, name)
            if where is None or where.module != module or name.startswith("_"):
                continue
            direct = [each for each in own_ops(where) if each not in seen]
            rows += [(f"`{path.parent.name}.{name}`", *op_row(*each)) for each in direct]
            seen |= set(direct)
    return table("op | CPU, compiled | CPU, torch | GPU | Triton kernels", rows)


def generated() -> str:
    """Return the generated part of the page."""
    parts, seen = list[str](), set[tuple[str, str]]()
    for title, module, owner, ops_method, step_method in PARTS:
        found = Walk(module, owner, []).method(ops_method)
        for each in found:
            if each.what.startswith(PACKAGE) and (where := function(*each.what.split(":"))):
                seen |= set(own_ops(where))
        parts += [f"## {title}", f"`{path_of(module).relative_to(ROOT)}`, `{owner}`."]
        parts += [f"The compiled step (`{step_method}`):"]
        parts += [compiled_step(Walk(module, owner, []).method(step_method))]
        parts += [f"By ops (`{ops_method}`):", by_ops(found)]
    parts += ["## Projections", projections(), "## Sampling", "`engine/steps/sampler.py`."]
    parts += [sampling(), "## Other ops", others(seen)]
    return "\n\n".join(parts)


def updated(page: str) -> str:
    """Return the page with its generated part made anew."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{generated()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
