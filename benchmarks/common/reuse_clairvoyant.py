"""An upper bound of reuse: a cache that knows all later requests, whatever it keeps.

A state is held in a row from one request that passes it to the next one, or not. Each request
starts from one state on its path that was held until it came, and computes the states behind it.
Every state where some request parts from what is known may be held: another one is read only by
requests that share one of these, further on, and could read that for the same row. The best choice
with so many rows at a time is a linear programme. Its relaxation to fractions of states makes it an
upper bound.

KV is never short. The rows of seats are left out: a run may borrow idle ones for snapshots, so it
may reuse more than this with hardly more rows than seats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from benchmarks.common.reuse_runs import places
from benchmarks.common.reuse_workloads import Asked
from vlm_serve.preprocess.identity.prompt import Prompt


@dataclass(frozen=True)
class _Read:
    """A state that a request may start from.

    Attributes:
        since: the request before that has passed it: it is held from there.
        until: the request.
        tokens: that it saves.
        before: index of the read that held the state until `since`; -1: it was new there.
    """

    since: int
    until: int
    tokens: int
    before: int


def _reads(asked: Sequence[Asked], prompts: Sequence[Prompt]) -> list[_Read]:
    """Return what each request may read: the states on its path where somebody parts."""
    paths = [places(one, prompt) for one, prompt in zip(asked, prompts, strict=True)]
    seen: set[bytes] = set()
    wanted: set[bytes] = set()
    for possible, passed in paths:
        wanted.update([next((key for key in possible if key in seen), b"")])
        seen.update(passed)
    last: dict[bytes, tuple[int, int]] = {}
    reads: list[_Read] = []
    for now, (possible, passed) in enumerate(paths):
        passed_now = wanted.intersection(passed)
        read_now = dict.fromkeys(passed_now, -1)
        for key in sorted(passed_now & possible.keys() & last.keys()):
            read_now[key] = len(reads)
            since, before = last[key]
            reads.append(_Read(since, now, possible[key], before))
        last.update({key: (now, read) for key, read in read_now.items()})
    return reads


class _Rows:
    """Rows of a sparse matrix, each an inequality or equation of the programme."""

    def __init__(self) -> None:
        self.limits: list[float] = []
        self._row: list[int] = []
        self._column: list[int] = []
        self._factor: list[float] = []

    def add(self, factors: Iterable[tuple[int, float]], limit: float) -> None:
        for column, factor in factors:
            self._row.append(len(self.limits))
            self._column.append(column)
            self._factor.append(factor)
        self.limits.append(limit)

    def matrix(self, columns: int) -> csr_array:
        places = (np.array(self._row), np.array(self._column))
        return csr_array((np.array(self._factor), places), (len(self.limits), columns))


class Clairvoyant:
    """The programme of a workload, to be solved for several budgets.

    Its variables are how much of each read's state is held, how much of it is read, and the idle
    rows between requests.

    Args:
        asked, prompts: the requests.
    """

    def __init__(self, asked: Sequence[Asked], prompts: Sequence[Prompt]) -> None:
        self._reads = _reads(asked, prompts)
        self._requests = len(prompts)
        self._at: list[list[int]] = [[] for _ in prompts]
        for index, read in enumerate(self._reads):
            self._at[read.until].append(index)

    def cached(self, rows: int) -> float:
        """Return the most tokens that requests take from `rows` snapshots."""
        reads, last = len(self._reads), self._requests - 1
        if not reads:
            return 0.0
        flow, limits = self._flow(rows), self._limits()
        tokens = np.array([read.tokens for read in self._reads], float)
        best = linprog(
            np.concatenate([np.zeros(reads), -tokens, np.zeros(last)]),
            A_ub=limits.matrix(2 * reads + last),
            b_ub=limits.limits,
            A_eq=flow.matrix(2 * reads + last),
            b_eq=flow.limits,
            bounds=[(0, 1)] * (2 * reads) + [(0, rows)] * last,
            method="highs",
        )
        assert best.success, best.message
        return abs(float(best.fun))

    def _flow(self, rows: int) -> _Rows:
        """Rows go from request to request, in a state or idle: all that come to one leave it."""
        reads, last = len(self._reads), self._requests - 1
        through: list[list[tuple[int, float]]] = [[] for _ in range(self._requests)]
        for index, read in enumerate(self._reads):
            through[read.since].append((index, 1.0))
            through[read.until].append((index, -1.0))
        for step in range(last):
            through[step].append((2 * reads + step, 1.0))
            through[step + 1].append((2 * reads + step, -1.0))
        flow = _Rows()
        for now, factors in enumerate(through):
            flow.add(factors, rows if now == 0 else -rows if now == last else 0)
        return flow

    def _limits(self) -> _Rows:
        """A request reads what is held, starts once, and makes no state before its start."""
        reads, limits = len(self._reads), _Rows()
        for index in range(reads):
            limits.add([(reads + index, 1.0), (index, -1.0)], 0)
        for now in self._at:
            limits.add([(reads + index, 1.0) for index in now], 1)
        for index, read in enumerate(self._reads):
            deeper = [
                (reads + other, 1.0)
                for other in self._at[read.since]
                if self._reads[other].tokens > read.tokens
            ]
            held = [(read.before, -1.0)] if read.before >= 0 else []
            if deeper:
                limits.add([(index, 1.0), *held, *deeper], 1)
        return limits
