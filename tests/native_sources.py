"""Reads from the native sources which file and functions perform an operation."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@cache
def native_sources() -> dict[Path, str]:
    """Return the texts of the native sources, without comments."""
    folders = (ROOT / "kernels" / "native", ROOT / "vlm_serve" / "models" / "native")
    found = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    texts = (
        path for path in found if path.suffix in (".h", ".cpp") and "self_test" not in path.name
    )
    return {path: re.sub(r"//.*", "", path.read_text(encoding="utf-8")) for path in texts}


def native_path(path: Path) -> str:
    """Return a native source as the documents write it."""
    return str(path.relative_to(ROOT)).removeprefix("vlm_serve/")


def native_body(text: str, head: str) -> str | None:
    """Return the body of the function or class whose definition matches `head`."""
    found = re.search(head + r"[^;{}]*\{", text)
    if found is None:
        return None
    depth, at = 1, found.end()
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return text[found.end() : at]


def defined_at(symbol: str) -> str:
    """Return the file that defines an entry point of the native library."""
    for path, text in native_sources().items():
        if path.suffix == ".cpp" and native_body(text, rf"\b{symbol}\(") is not None:
            return native_path(path)
    raise LookupError(symbol)


@cache
def workers() -> dict[str, str]:
    """Return native functions that work on rows: name -> file. Those on vectors are left out."""
    found: dict[str, str] = {}
    for path, text in native_sources().items():
        for match in re.finditer(r"^(?:inline )?void (\w+)\(([^;{}]*?)\) \{", text, re.M):
            if "Vec" not in match[2]:
                found.setdefault(match[1], native_path(path))
        for match in re.finditer(r"^class (\w+)", text, re.M):
            found.setdefault(match[1], native_path(path))
    return found


def operation(name: str) -> tuple[str, str]:
    """Return the file that performs an operation, and the native functions that it runs."""
    head = rf"void perform\((?:const )?Run& run, const {name}&"
    for path, text in native_sources().items():
        body = native_body(text, head)
        if body is None:
            continue
        for helper in re.findall(r"\b(\w+)<[\w, ]+>(?: \w+)?[({]run, op[)}]", body):
            body += native_body(text, rf"\b(?:void {helper}\(|struct {helper}\b)") or ""
        names = dict.fromkeys(re.findall(r"(?<![\w.])(\w+)(?:<[\w, ]+>)?(?: \w+)?\(", body))
        used = [(each, workers()[each]) for each in names if each in workers()]
        here = native_path(path)
        return here, ", ".join(
            f"`{each}`" + (f" (`{file}`)" if file != here else "") for each, file in used
        )
    raise LookupError(name)
