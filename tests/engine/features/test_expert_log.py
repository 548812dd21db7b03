"""Rows of routed experts with gaps, compared with a plain dict of tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vlm_serve.cache.experts import ExpertPiece, Rows
from vlm_serve.engine.features.routed_experts import ExpertLog

LAYERS, TOP_K = 3, 2


def rows(draw: random.Random, count: int) -> Rows:
    values = [draw.randrange(1, 256) for _ in range(count * LAYERS * TOP_K)]
    return np.array(values, dtype=np.uint8).reshape(count, LAYERS, TOP_K)


def compare(log: ExpertLog, known: dict[int, Rows], start: int, end: int) -> None:
    """What the log says of tokens `[start, end)` against what was put in."""
    got, gaps = log.take(start, end)
    assert got.shape == (end - start, LAYERS, TOP_K) and got.dtype == np.uint8
    unknown = {token for first, last in gaps for token in range(first, last)}
    assert unknown == {token for token in range(start, end) if token not in known}
    assert all(first < last for first, last in gaps)
    assert all(a[1] < b[0] for a, b in zip(gaps, gaps[1:], strict=False)), "in order and apart"
    for token in range(start, end):
        expected = known.get(token, np.zeros((LAYERS, TOP_K), dtype=np.uint8))
        assert np.array_equal(got[token - start], expected)
    assert log.num_unknown(end) == sum(token not in known for token in range(end))


@pytest.mark.parametrize("seed", range(20))
def test_rows_put_in_any_order_come_out_again(seed: int) -> None:
    draw = random.Random(seed)
    log, known = ExpertLog(), dict[int, Rows]()
    for _ in range(12):
        start, count = draw.randrange(300), draw.randrange(1, 40)
        put = rows(draw, count)
        log.put(start, put)
        known |= {start + index: put[index] for index in range(count)}
        first = draw.randrange(340)
        compare(log, known, first, first + draw.randrange(1, 100))
    compare(log, known, 0, 400)


def test_pieces_of_the_cache_fill_in_and_leave_gaps() -> None:
    draw = random.Random(0)
    log, first, last = ExpertLog(), rows(draw, 4), rows(draw, 8)
    # A piece's rows may be those of a whole block, of which only the first tokens are meant.
    log.replay([ExpertPiece(0, 4, first), ExpertPiece(4, 8, None), ExpertPiece(8, 11, last)])
    known = dict(enumerate(first)) | {8 + index: last[index] for index in range(3)}
    compare(log, known, 0, 11)
    assert log.take(0, 11)[1] == ((4, 8),)


def test_what_the_cache_lacks_keeps_what_was_computed() -> None:
    draw = random.Random(1)
    log, own = ExpertLog(), rows(draw, 8)
    log.put(0, own)
    log.replay([ExpertPiece(0, 8, None)])
    compare(log, dict(enumerate(own)), 0, 8)


def test_a_fork_has_rows_of_its_own() -> None:
    draw = random.Random(2)
    log, shared, changed = ExpertLog(), rows(draw, 5), rows(draw, 5)
    log.put(0, shared)
    fork = log.copy()
    fork.put(2, changed)
    compare(log, dict(enumerate(shared)), 0, 7)
    compare(fork, dict(enumerate([*shared[:2], *changed])), 0, 7)
    log.put(5, changed[:1])
    assert (log.num_unknown(7), fork.num_unknown(7)) == (1, 0)


def test_an_empty_log_knows_nothing() -> None:
    log = ExpertLog()
    assert log.num_unknown(9) == 9
    assert log.copy().num_unknown(3) == 3
