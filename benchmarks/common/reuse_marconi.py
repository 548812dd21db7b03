"""Marconi's choice of victims (arXiv 2411.19379, section 4.2), for rows of states.

A snapshot's score is its recency plus alpha times its FLOP efficiency: the operations that it
spares a request which would start from the snapshot before it, by the bytes that it holds. Both
are scaled to [0, 1] over the candidates, which have at most one snapshot directly behind them.

Alpha is 0 until ten times as many requests have come as before the first eviction (the paper says
5 to 15 times). Then the requests so far are replayed with several alphas, and the best one stays.
Where a trace ends before, this is LRU over ends and junctions, but for what has two followers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmarks.common.reuse_rivals import Rule, SnapshotTree
from benchmarks.common.reuse_shape import BLOCK_BYTES, BLOCK_SIZE, STATE_BYTES
from vlm_serve.cache.matching import key_at
from vlm_serve.cache.records import Snapshot
from vlm_serve.preprocess.identity.keys import PromptKeys

WINDOW = 10
ALPHAS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
# Of a model of 4B: two operations a token for each parameter, and for each pair of tokens four for
# each of 4096 numbers of a query, in eight layers; half of the pairs are masked.
TOKEN_FLOPS, PAIR_FLOPS = 8.0e9, 2.0 * 4096 * 8
TOKEN_BYTES = BLOCK_BYTES / BLOCK_SIZE


Floats = npt.NDArray[np.float64]


def flop_efficiency(starts: Floats, ends: Floats) -> Floats:
    """Return the operations that states at `ends` spare requests that would start from `starts`, by
    the bytes of the state and of the KV between."""
    lengths = ends - starts
    flops = TOKEN_FLOPS * lengths + PAIR_FLOPS * (ends**2 - starts**2)
    return flops / (STATE_BYTES + TOKEN_BYTES * lengths)


def _scaled(values: Floats) -> Floats:
    """Scale to [0, 1]; equal values are all 0."""
    span = values.max() - values.min()
    return (values - values.min()) / span if span else np.zeros_like(values)


def lowest_score(last_used: Floats, starts: Floats, ends: Floats, alpha: float) -> int:
    """Return the index of the snapshot with the lowest score."""
    recency = _scaled(last_used)
    if not alpha:
        return int(recency.argmin())
    return int((recency + alpha * _scaled(flop_efficiency(starts, ends))).argmin())


@dataclass(frozen=True)
class _Asked:
    """A request: the keys of its cut points up to where it may start, and those of its
    snapshots."""

    cuts: dict[bytes, int]
    made: tuple[tuple[bytes, int], ...]


class FlopAware(Rule):
    """Marconi's rule.

    Args:
        rows: budget of snapshots.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._log: list[_Asked] = []
        self._first = 0
        self._tuned = False
        self.alpha = 0.0

    def victim(self, candidates: Sequence[Snapshot], tree: SnapshotTree) -> Snapshot:
        ends = [each for each in candidates if len(tree.below[each]) <= 1] or candidates
        chosen = lowest_score(
            np.array([each.last_used for each in ends], float),
            np.array([tree.start(each) for each in ends], float),
            np.array([each.position for each in ends], float),
            self.alpha,
        )
        return ends[chosen]

    def evicted(self) -> None:
        self._first = self._first or len(self._log)

    def asked(self, keys: PromptKeys, limit: int, positions: Sequence[int]) -> None:
        if self._tuned:
            return
        at = {cut: key_at(keys, cut) for cut in keys.cuts if cut <= limit}
        made = tuple((at[place], place) for place in positions if place in at)
        self._log.append(_Asked({key: cut for cut, key in at.items()}, made))
        if self._first and len(self._log) >= (1 + WINDOW) * self._first:
            saved = [replayed(self._log, self._rows, alpha) for alpha in ALPHAS]
            self.alpha, self._tuned = ALPHAS[int(np.argmax(saved))], True
            self._log.clear()


@dataclass
class _Rows:
    """Snapshots of a replay, by key: position, start and last use."""

    most: int
    held: dict[bytes, tuple[int, int, int]] = field(default_factory=dict)

    def add(self, key: bytes, position: int, start: int, now: int, alpha: float) -> None:
        if key not in self.held and len(self.held) >= self.most:
            ends, starts, used = np.array(list(self.held.values()), float).T
            del self.held[list(self.held)[lowest_score(used, starts, ends, alpha)]]
        self.held[key] = position, start, now


def replayed(log: Sequence[_Asked], rows: int, alpha: float) -> int:
    """Return the tokens that requests take from that many rows; here every snapshot is a
    candidate."""
    cache, saved = _Rows(rows), 0
    for now, asked in enumerate(log):
        usable = [(cut, key) for key, cut in asked.cuts.items() if key in cache.held]
        start, key = max(usable, default=(0, b""))
        saved += start
        if start:
            cache.held[key] = (*cache.held[key][:2], now)
        for made, position in asked.made:
            cache.add(made, position, start, now, alpha)
            start = position
    return saved
