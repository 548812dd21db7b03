"""Where two prompts part: the deepest boundary that both have.

docs/architecture.md#cut-points-and-matching
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlm_serve.preprocess.keys import PromptKeys


def shared_cut(keys: PromptKeys, other: PromptKeys, *, least: int, limit: int) -> int:
    """Return the deepest cut point in `[least, limit]`, outside of media spans, before which two
    prompts are the same; 0 if there is none.

    A cut point depends only on the tokens before it, so it is one of both prompts.

    Args:
        keys: of the prompt whose boundary is wanted.
        other: keys of the prompt that is computed.
        least: at least 1.
        limit: the deepest position that is allowed.
    """
    assert least > 0 and keys.block_size == other.block_size
    mine, theirs, size = keys.block_keys, other.block_keys, keys.block_size
    most = min(len(mine), len(theirs))
    first = least // size
    # Keys are chained: equal keys mean equal prefixes, so one comparison refuses most prompts.
    if first > most or (first and mine[first - 1] != theirs[first - 1]):
        return 0
    full = bisect_left(range(first, most), True, key=lambda index: mine[index] != theirs[index])
    full += first
    last = bisect_right(keys.cuts, min(limit, full * size + size - 1))
    for index in range(last - 1, -1, -1):
        cut = keys.cuts[index]
        if cut < least:
            break
        equal = cut <= full * size or other.tails.get(cut) == keys.tails[cut]
        if equal and not keys.inside_span(cut):
            return cut
    return 0
