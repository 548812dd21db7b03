"""What the machine code of every kernel took when it was last checked, in one compressed file.

A row holds for as long as nothing that is compiled changes: its digest covers the source of the
kernel and of all that it calls, types, constants and options of every variant, and `READING`. So a
kernel with the same digest need not be compiled again.
"""

from __future__ import annotations

import ast
import hashlib
import json
import lzma
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.aot_compile import Usage, specialisation
from vlm_serve.kernels.triton_support import Launch

FILE = Path(__file__).parents[1] / "aot.json.xz"
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


def parse(packed: bytes) -> dict[str, Rows]:
    """Return the rows of a kept file, by the version of Triton."""
    found: dict[str, Rows] = json.loads(lzma.decompress(packed))
    return found


def versions() -> list[str]:
    """Return the versions of Triton that have rows."""
    return sorted(parse(FILE.read_bytes())) if FILE.exists() else []


def read(version: str) -> Rows:
    """Return the rows of a Triton version; none if it was never checked."""
    return parse(FILE.read_bytes()).get(version, {}) if FILE.exists() else {}


def write(version: str, rows: Rows) -> None:
    """Keep the rows of a version, in place of those that it had."""
    kept = {**{each: read(each) for each in versions()}, version: rows}
    text = json.dumps({each: kept[each] for each in sorted(kept)}, separators=(",", ":"))
    FILE.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def row(key: str, variants: int, usage: Usage) -> dict[str, Any]:
    """Return a kernel's row."""
    return {"digest": key, "variants": variants, **asdict(usage)}


def usage_of(kept: dict[str, Any]) -> Usage:
    """Return what a row says that a kernel takes."""
    fields = {name: value for name, value in kept.items() if name not in ("digest", "variants")}
    return Usage(**fields)
