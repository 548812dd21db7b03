"""Sizes of slices: ends of prefill slices and chunks at cut points, and drafts at most.

docs/architecture.md#cut-points-and-matching
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

MAX_DRAFTS_WHEN_FEW = 32
"""Maximum number of drafts per sequence and step while few sequences run."""


def slice_end(cuts: Sequence[int], start: int, target: int, budget: int) -> int:
    """Return the end of the next prefill slice from `start`. It is the target if the budget
    suffices, else the last cut point within the budget. If even the next cut point is out of reach,
    return `start`.

    Args:
        cuts: all cut points, ascending.
        start: first token not computed yet.
        target: end of the prefill.
        budget: maximum number of tokens.
    """
    assert start < target
    if target - start <= budget:
        return target
    position = bisect_right(cuts, start + budget) - 1
    return max(start, cuts[position]) if position >= 0 else start


def chunk_ends(
    cuts: Sequence[int], start: int, end: int, block_size: int, chunk_size: int
) -> tuple[int, ...]:
    """Return the absolute positions at which the chunks of tokens `[start, end)` end, ascending.

    Chunks run from cut point to cut point and are cut at multiples of the chunk size in between, so
    they do not depend on where a run started. Multiples of the block size are cut points already.
    """
    inside = cuts[bisect_right(cuts, start) : bisect_left(cuts, end)]
    if chunk_size == block_size:
        return (*inside, end)
    first = (start // chunk_size + 1) * chunk_size
    return (*sorted({*inside, *range(first, end, chunk_size)}), end)


def max_drafts(most: int, running: int, sequences: int) -> int:
    """Return the maximum number of drafts per sequence and step.

    If only one sequence runs, or at most a quarter of the allowed `sequences`, each may also use
    the update slot of another one.

    Args:
        most: limit while more sequences run.
    """
    few = sequences > 1 and running <= max(1, sequences // 4)
    return max(most, min(2 * most + 1, MAX_DRAFTS_WHEN_FEW)) if few else most
