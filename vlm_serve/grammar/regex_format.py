"""The format `regex` as a pattern: expressions that Python, JavaScript and Rust all take.

Groups nest, which no pattern can follow to any depth, so their depth is limited. Left out are
references, names of groups, and what looks ahead or behind: engines differ about them.
"""

from __future__ import annotations

_DEPTH = 3
_PLAIN = r"[^\[\](){}.*+?^$|\\\x00-\x1f\x7f]"
_ESCAPED = r"\\(?:[dDwWsSnrtfv]|[\[\](){}.*+?^$|\\/])"
_IN_CLASS = rf"(?:[^\[\]&~|^\\\-\x00-\x1f\x7f]|{_ESCAPED}|\\-)"
_RANGE = "(?:a-z|A-Z|0-9|a-f|A-F)"
_CLASS = rf"\[\^?-?(?:{_RANGE}|{_IN_CLASS})+-?\]"
_COUNT = r"\{(?:[0-9]{1,3},?|[01],[1-9][0-9]{0,2})\}"
_QUANTIFIER = rf"(?:(?:[*+?]|{_COUNT})\??)?"
_ANCHOR = r"[\^$]|\\[bB]"


def _nested(depth: int) -> str:
    """Return the pattern of an expression with groups to a depth."""
    atoms = [_PLAIN, _ESCAPED, r"\.", _CLASS]
    if depth:
        atoms.append(rf"\((?:\?:)?{_nested(depth - 1)}\)")
    return rf"(?:(?:{'|'.join(atoms)}){_QUANTIFIER}|{_ANCHOR}|\|)*"


REGEX = f"^{_nested(_DEPTH)}$"
