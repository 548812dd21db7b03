"""What a router has given each replica to do."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

MAX_REPLICAS = 4096
MAX_OPEN_KINDS = 65_536
"""Kinds of open requests that are told apart, by replica and longest key."""
_MAX_AGE = 50.0


class Loads:
    """Tokens to compute, by replica.

    Args:
        memory_seconds: after so long work that was given counts 1/e of what it was.
    """

    def __init__(self, memory_seconds: float) -> None:
        self._memory_seconds = memory_seconds
        # All of it fades alike, so it is kept as of `_since`: what is added later counts for more.
        self._work: dict[str, float] = {}
        self._since = 0.0
        self._open: dict[str, float] = {}
        self._kinds: OrderedDict[tuple[str, bytes], list[float]] = OrderedDict()

    def works(self, now: float) -> tuple[dict[str, float], float]:
        """Tokens given to each replica of late, each times the second value. Not to be changed."""
        return self._work, self._growth(now)

    def work(self, replica: str, now: float) -> float:
        """Tokens given to one of late."""
        return self._work.get(replica, 0.0) / self._growth(now)

    def _growth(self, now: float) -> float:
        age = (now - self._since) / self._memory_seconds
        if age > _MAX_AGE:
            growth = math.exp(min(age, 700.0))
            self._work = {name: work / growth for name, work in self._work.items()}
            self._since, age = now, 0.0
        return math.exp(age)

    def open(self, replica: str) -> float:
        """Tokens of requests that have not ended."""
        return self._open.get(replica, 0.0)

    def know(self, replicas: Iterable[str]) -> None:
        """One that is new begins with what the others have on average: it gets its share of what
        comes, not all of it."""
        new = [each for each in replicas if each not in self._work]
        if not new:
            return
        if len(self._work) + len(new) > MAX_REPLICAS:
            self._work.clear()
            self._open.clear()
        average = sum(self._work.values()) / len(self._work) if self._work else 0.0
        self._work.update(dict.fromkeys(new, average))

    def sent(self, replica: str, kind: bytes, tokens: float, now: float) -> None:
        """A request goes to a replica, which has so many tokens to compute for it."""
        growth = self._growth(now)
        self._work[replica] = self._work.get(replica, 0.0) + tokens * growth
        self._open[replica] = self.open(replica) + tokens
        entry = self._kinds.setdefault((replica, kind), [0.0, 0.0])
        entry[0] += 1
        entry[1] += tokens
        if len(self._kinds) > MAX_OPEN_KINDS:
            (other, _), (_, forgotten) = self._kinds.popitem(last=False)
            self._close(other, forgotten)

    def ended(self, replica: str, kind: bytes, now: float, spent: float | None = None) -> None:
        """One of that kind has ended there; one that is not known changes nothing.

        Args:
            spent: tokens that were computed for it, if that is known: they take the place of those
                that were expected.
        """
        entry = self._kinds.get((replica, kind))
        if entry is None:
            return
        tokens = entry[1] / entry[0]
        if spent is not None:
            more = (spent - tokens) * self._growth(now)
            self._work[replica] = max(0.0, self._work.get(replica, 0.0) + more)
        entry[0] -= 1
        entry[1] -= tokens
        if entry[0] < 1:
            del self._kinds[replica, kind]
        self._close(replica, tokens)

    def remove(self, replica: str) -> None:
        """Forgets a replica."""
        self._work.pop(replica, None)
        self._open.pop(replica, None)
        for each in [each for each in self._kinds if each[0] == replica]:
            del self._kinds[each]

    def _close(self, replica: str, tokens: float) -> None:
        if replica in self._open:
            self._open[replica] = max(0.0, self._open[replica] - tokens)
