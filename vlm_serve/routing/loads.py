"""Accounting of the work assigned to each replica."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

MAX_REPLICAS = 4096
MAX_OPEN_KINDS = 65_536
"""Kinds of open requests: pairs of a replica and a longest key."""
_MAX_AGE = 50.0


class Loads:
    """Tokens to compute, by replica.

    Args:
        memory_seconds: time constant: after so long, assigned work counts 1/e.
    """

    def __init__(self, memory_seconds: float) -> None:
        self._memory_seconds = memory_seconds
        # All work decays alike, so it is stored as of `_since`, and later work is added scaled up.
        self._work: dict[str, float] = {}
        self._since = 0.0
        self._open: dict[str, float] = {}
        self._kinds: OrderedDict[tuple[str, bytes], list[float]] = OrderedDict()

    def works(self, now: float) -> tuple[dict[str, float], float]:
        """Return recent tokens by replica, read-only, and their scale factor."""
        return self._work, self._growth(now)

    def work(self, replica: str, now: float) -> float:
        """Return the tokens assigned to a replica recently, with decay."""
        return self._work.get(replica, 0.0) / self._growth(now)

    def _growth(self, now: float) -> float:
        age = (now - self._since) / self._memory_seconds
        if age > _MAX_AGE:
            growth = math.exp(min(age, 700.0))
            self._work = {name: work / growth for name, work in self._work.items()}
            self._since, age = now, 0.0
        return math.exp(age)

    def open(self, replica: str) -> float:
        """Return the tokens of a replica's open requests."""
        return self._open.get(replica, 0.0)

    def add_new(self, replicas: Iterable[str]) -> None:
        """Add new replicas, with the average work of the others.

        Starting at zero, a new replica would attract all requests.
        """
        new = [each for each in replicas if each not in self._work]
        if not new:
            return
        if len(self._work) + len(new) > MAX_REPLICAS:
            self._work.clear()
            self._open.clear()
        average = sum(self._work.values()) / len(self._work) if self._work else 0.0
        self._work.update(dict.fromkeys(new, average))

    def sent(self, replica: str, kind: bytes, tokens: float, now: float) -> None:
        """Add a request for a replica, with the tokens to compute."""
        growth = self._growth(now)
        self._work[replica] = self._work.get(replica, 0.0) + tokens * growth
        self._open[replica] = self.open(replica) + tokens
        entry = self._kinds.setdefault((replica, kind), [0.0, 0.0])
        entry[0] += 1
        entry[1] += tokens
        if len(self._kinds) > MAX_OPEN_KINDS:
            (other, _), (_, forgotten) = self._kinds.popitem(last=False)
            self._close(other, forgotten)

    def ended(self, replica: str, kind: bytes, now: float, computed: float | None = None) -> None:
        """Remove a request of that kind; an unknown kind changes nothing.

        Args:
            computed: tokens that were computed, if known; they replace the expected ones.
        """
        entry = self._kinds.get((replica, kind))
        if entry is None:
            return
        tokens = entry[1] / entry[0]
        if computed is not None:
            more = (computed - tokens) * self._growth(now)
            self._work[replica] = max(0.0, self._work.get(replica, 0.0) + more)
        entry[0] -= 1
        entry[1] -= tokens
        if entry[0] < 1:
            del self._kinds[replica, kind]
        self._close(replica, tokens)

    def remove(self, replica: str) -> None:
        """Forget a replica."""
        self._work.pop(replica, None)
        self._open.pop(replica, None)
        for each in [each for each in self._kinds if each[0] == replica]:
            del self._kinds[each]

    def _close(self, replica: str, tokens: float) -> None:
        if replica in self._open:
            self._open[replica] = max(0.0, self._open[replica] - tokens)
