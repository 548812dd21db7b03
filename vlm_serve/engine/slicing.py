"""Where prefill slices and GDN chunks end: arithmetic on cut points.

docs/architecture.md#cut-points-and-matching
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


def slice_end(cuts: Sequence[int], start: int, target: int, budget: int) -> int:
    """End of the next prefill slice from `start`: the target if the budget reaches it, else the
    last cut point within the budget; `start` itself when not even the next one is within reach.

    Args:
        cuts: all cut points, ascending.
        start: first token not computed yet.
        target: end of the prefill.
        budget: most tokens to grant.
    """
    assert start < target
    if target - start <= budget:
        return target
    position = bisect_right(cuts, start + budget) - 1
    return max(start, cuts[position]) if position >= 0 else start


def chunk_ends(
    cuts: Sequence[int], start: int, end: int, block_size: int, chunk_size: int
) -> tuple[int, ...]:
    """Absolute positions at which the GDN chunks of tokens `[start, end)` end, ascending.

    Chunks run from cut point to cut point and are cut at multiples of the chunk size in between, so
    they do not depend on where a run started. Multiples of the block size are cut points already.
    """
    inside = cuts[bisect_right(cuts, start) : bisect_left(cuts, end)]
    if chunk_size == block_size:
        return (*inside, end)
    first = (start // chunk_size + 1) * chunk_size
    return (*sorted({*inside, *range(first, end, chunk_size)}), end)
