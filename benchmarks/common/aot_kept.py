"""What the machine code of every kernel took when it was last checked, one file a Triton version.

A row holds for as long as nothing that is compiled changes: its digest covers the source of the
kernel and of all that it calls, types, constants and options of every variant, and `READING`. So a
kernel with the same digest need not be compiled again.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.aot_compile import Usage, specialisation
from vlm_serve.kernels.triton_support import Launch

FOLDER = Path(__file__).parents[1] / "aot"
READING = 1
"""Raised whenever something else is read from the code."""

Rows = dict[str, dict[str, dict[str, Any]]]
"""By target and kernel: `digest`, `variants` and the fields of `Usage`."""


def digest(launches: Sequence[Launch]) -> str:
    """Digest what the variants of one kernel are compiled from."""
    variants = sorted(repr(specialisation(launch)) for launch in launches)
    parts = [str(READING), *_sources(launches[0].kernel, {}).values(), *variants]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def _sources(kernel: Any, found: dict[str, str]) -> dict[str, str]:
    """Add the code of a function and of the functions and constants that it names, by name."""
    function = kernel.fn
    name = f"{function.__module__}.{function.__qualname__}"
    if name in found:
        return found
    tree = ast.parse(kernel.src)
    found[name] = ast.unparse(_without_docstrings(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name):
            continue
        value = function.__globals__.get(node.id)
        if hasattr(value, "fn") and hasattr(value, "params"):
            _sources(value, found)
        elif type(value).__name__ == "constexpr":
            found[f"{name}:{node.id}"] = repr(value)
    return found


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def read(version: str) -> Rows:
    """Return the rows of a Triton version; none if it was never checked."""
    path = FOLDER / f"triton-{version}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(version: str, rows: Rows) -> None:
    """Keep rows, one a line."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    blocks = []
    for target, kernels in rows.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(kernels[name])}" for name in sorted(kernels)]
        blocks.append(f" {json.dumps(target)}: {{\n" + ",\n".join(lines) + "\n }")
    text = "{\n" + ",\n".join(blocks) + "\n}\n"
    (FOLDER / f"triton-{version}.json").write_text(text, encoding="utf-8")


def row(key: str, variants: int, usage: Usage) -> dict[str, Any]:
    """Return a kernel's row."""
    return {"digest": key, "variants": variants, **asdict(usage)}


def usage_of(kept: dict[str, Any]) -> Usage:
    """Return what a row says that a kernel takes."""
    fields = {name: value for name, value in kept.items() if name not in ("digest", "variants")}
    return Usage(**fields)
