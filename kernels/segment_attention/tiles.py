"""Tiles of queries of packed segments."""

from __future__ import annotations

from collections.abc import Sequence

ROWS = 64
"""Queries of a tile."""


def segment_tiles(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (begin, end, first query) for each tile of packed segments, in their order."""
    tiles, begin = list[tuple[int, int, int]](), 0
    for length in lengths:
        end = begin + length
        tiles += [(begin, end, first) for first in range(begin, end, ROWS)]
        begin = end
    return tiles
