"""The modules of the package and what their docstrings say.

Source text is read and nothing is imported. No module is found twice: links are not followed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LINKED = ("cache", "kernels", "preprocess")
"""Folders that are imported through links in `vlm_serve`."""


def modules_of(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules below a folder of the checkout, each with its name and its text, parsed."""
    for path in sorted(folder.rglob("*.py")):
        inner = path.relative_to(ROOT).with_suffix("")
        if len(inner.parts) > 1 and inner.parts[0] == "vlm_serve" and inner.parts[1] in LINKED:
            continue
        parts = [*([] if inner.parts[0] == "vlm_serve" else ["vlm_serve"]), *inner.parts]
        name = ".".join(parts).removesuffix(".__init__")
        yield name, ast.parse(path.read_text(encoding="utf-8"))


def public_names(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the public classes and functions of a module, each with its docstring's beginning."""
    for node in module.body:
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and not node.name.startswith("_"):
            yield node.name, beginning(ast.get_docstring(node))


def beginning(docstring: str | None) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((docstring or "").split("\n\n")[0].split())
