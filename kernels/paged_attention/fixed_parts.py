"""Parts of the keys with bounds from positions alone, for decoding whose bits depend on no other
sequence of the step."""

from __future__ import annotations

FIXED_PART = 2048
"""Keys of a part; a multiple of every tile."""


def fixed_part_bytes(heads: int, dim: int, keys: int) -> int:
    """Return the bytes of one decode token's partial sums in one layer, all float32: for each head
    and part a maximum, a norm and `dim` totals.

    Args:
        keys: tokens of the longest sequence of the step.
    """
    return 4 * heads * -(-keys // FIXED_PART) * (dim + 2)
