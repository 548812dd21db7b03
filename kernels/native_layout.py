"""Structs and constants of the C++ sources, for Python: each is declared once, in C++.

Both are parsed from the library's own sources, so the two sides cannot differ. Structs for Python
are plain: 64-bit integers, doubles, pointers and other such structs.
`ctypes` lays them out as compilers do.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any

from vlm_serve.kernels.native_build import SOURCES

_COMMENT = re.compile(r"//[^\n]*")
_METHOD = re.compile(r"\w+ \w+\([^)]*\) const \{[^}]*\}")
_PLAIN = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}


@cache
def struct(name: str) -> type[ctypes.Structure]:
    """Return a C++ struct as a `ctypes` structure; omitted fields are zero.

    Raises:
        KeyError: there is none, or one of its fields is not plain.
    """
    body = re.search(rf"^struct {name} \{{(.*?)^\}};", _sources(), re.MULTILINE | re.DOTALL)
    if body is None:
        raise KeyError(name)
    fields: list[tuple[str, Any]] = []
    for declaration in _METHOD.sub("", body.group(1)).split(";")[:-1]:
        kind, names = declaration.replace("const ", "").split(maxsplit=1)
        for declared in names.split(","):
            pointer = "*" in kind + declared
            fields.append((declared.strip(" *\n"), ctypes.c_void_p if pointer else _kind(kind)))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


@cache
def constant(name: str) -> int:
    """Return the value of the C++ constants or enumerators with this name.

    Raises:
        KeyError: there is none, or their values differ.
    """
    values = set(re.findall(rf"\b{name} = (\d+)\b", _sources()))
    if len(values) != 1:
        raise KeyError(name)
    return int(values.pop())


def _kind(name: str) -> Any:
    return _PLAIN[name] if name in _PLAIN else struct(name)


@cache
def _sources() -> str:
    files = sorted(path for folder in SOURCES for path in folder.rglob("*") if path.is_file())
    return _COMMENT.sub("", "\n".join(file.read_text(encoding="utf-8") for file in files))
