"""Slices end at cut points; chunks do not depend on where a run starts."""

from __future__ import annotations

import random

import pytest

from vlm_serve.engine.core.slicing import chunk_ends, slice_end


def _cuts(length: int, block_size: int, extra: set[int]) -> list[int]:
    return sorted({*range(block_size, length + 1, block_size), *extra})


def test_a_slice_reaches_the_target_when_the_budget_does() -> None:
    assert slice_end([16, 32], 0, 40, 40) == 40
    assert slice_end([16, 32], 32, 40, 8) == 40


def test_a_slice_is_floored_to_the_last_cut() -> None:
    assert slice_end([16, 21, 32], 0, 40, 31) == 21
    assert slice_end([16, 21, 32], 21, 40, 18) == 32


def test_no_cut_within_reach_grants_nothing() -> None:
    assert slice_end([16, 32], 16, 40, 15) == 16
    assert slice_end([], 0, 40, 15) == 0


@pytest.mark.parametrize(("block_size", "chunk_size"), [(16, 16), (64, 64), (128, 64)])
def test_chunks_are_the_same_wherever_a_run_starts(block_size: int, chunk_size: int) -> None:
    rng = random.Random(block_size)
    for _ in range(50):
        length = rng.randint(1, 700)
        cuts = _cuts(length, block_size, {rng.randint(1, length) for _ in range(3)})
        whole = chunk_ends(cuts, 0, length, block_size, chunk_size)
        assert whole[-1] == length
        starts = [0, *whole]
        assert all(0 < b - a <= chunk_size for a, b in zip(starts, whole, strict=False))
        for start in cuts:
            if start < length:
                resumed = chunk_ends(cuts, start, length, block_size, chunk_size)
                assert resumed == tuple(end for end in whole if end > start)
