"""What Python and the C++ in `native/` must agree on, and whether they do.

A `ctypes` structure names the C++ struct that it mirrors, and a number that is repeated here names
its C++ constant. `native/layout.h` has the library list its own; `disagreement` compares both
before any function is called, since a field in the wrong place would corrupt memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeVar

Structure = TypeVar("Structure", bound=type[ctypes.Structure])

structures: dict[str, type[ctypes.Structure]] = {}
"""Every mirrored struct, by its name in C++."""
constants: dict[str, int] = {}
"""Every repeated constant, by its name in C++."""


def mirrors(name: str) -> Callable[[Structure], Structure]:
    """A decorator of the structure that mirrors the C++ struct of that name: the same fields in the
    same order, under the same names."""

    def register(structure: Structure) -> Structure:
        structures[name] = structure
        return structure

    return register


def constant(name: str, value: int) -> int:
    """`value`, which the C++ constant of that name must have."""
    constants[name] = value
    return value


def disagreement(layout: str) -> str | None:
    """The first difference between what is registered here and what a library says of itself.

    Args:
        layout: what `vlm_layout` returns: lines `struct NAME SIZE` followed by `FIELD OFFSET SIZE`
            for every field, and lines `constant NAME VALUE`, all separated by blanks.

    Returns:
        A sentence that names the struct and field or the constant; None if all is alike.
    """
    theirs = {tuple(words[:2]): words[2:] for words in map(str.split, layout.splitlines())}
    for name, value in constants.items():
        own = theirs.get(("constant", name))
        if own != [str(value)]:
            return f"constant {name} is {value} in Python, {own[0] if own else 'absent'} in C++"
    for name, structure in structures.items():
        found = theirs.get(("struct", name))
        if found is None:
            return f"struct {name} is absent in C++"
        difference = _difference(structure, found)
        if difference:
            return f"struct {name} {difference}"
    return None


def _difference(structure: type[ctypes.Structure], found: list[str]) -> str | None:
    size, *words = found
    fields = list(zip(words[::3], words[1::3], words[2::3], strict=True))
    names = [str(field[0]) for field in structure._fields_]
    for (theirs, offset, width), name in zip(fields, names, strict=False):
        own = getattr(structure, name)
        if theirs != name:
            return f"has the field {name} in Python where C++ has {theirs}"
        if (str(own.offset), str(own.size)) != (offset, width):
            place = f"at {own.offset} with {own.size} bytes in Python"
            return f"has the field {name} {place}, at {offset} with {width} in C++"
    if len(fields) != len(names):
        return f"has {len(names)} fields in Python and {len(fields)} in C++"
    if ctypes.sizeof(structure) != int(size):
        return f"has {ctypes.sizeof(structure)} bytes in Python and {size} in C++"
    return None
