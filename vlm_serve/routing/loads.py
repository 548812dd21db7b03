"""What a router has given each replica to do."""

from __future__ import annotations

import math
from collections import OrderedDict

MAX_REPLICAS = 4096
MAX_OPEN_KINDS = 65_536
"""Kinds of open requests that are told apart, by replica and longest key."""


class Loads:
    """Tokens to compute, by replica.

    Args:
        memory_seconds: after so long work that was given counts 1/e of what it was.
    """

    def __init__(self, memory_seconds: float) -> None:
        self._memory_seconds = memory_seconds
        self._work: dict[str, tuple[float, float]] = {}
        self._open: dict[str, float] = {}
        self._kinds: OrderedDict[tuple[str, bytes], list[float]] = OrderedDict()

    def work(self, replica: str, now: float) -> float:
        """Tokens given of late; of one not seen before None is known: 0."""
        given = self._work.get(replica)
        if given is None:
            return 0.0
        tokens, then = given
        return tokens * math.exp((then - now) / self._memory_seconds) if now > then else tokens

    def open(self, replica: str) -> float:
        """Tokens of requests that have not ended."""
        return self._open.get(replica, 0.0)

    def know(self, replicas: set[str], now: float) -> None:
        """One that is new begins with what the others have on average: it gets its share of what
        comes, not all of it."""
        new = replicas - self._work.keys()
        if not new:
            return
        if len(self._work) + len(new) > MAX_REPLICAS:
            self._work.clear()
            self._open.clear()
        known = [self.work(each, now) for each in self._work]
        average = sum(known) / len(known) if known else 0.0
        self._work.update(dict.fromkeys(new, (average, now)))

    def sent(self, replica: str, kind: bytes, tokens: float, now: float) -> None:
        """A request goes to a replica, which has so many tokens to compute for it."""
        self._work[replica] = (self.work(replica, now) + tokens, now)
        self._open[replica] = self.open(replica) + tokens
        entry = self._kinds.setdefault((replica, kind), [0.0, 0.0])
        entry[0] += 1
        entry[1] += tokens
        if len(self._kinds) > MAX_OPEN_KINDS:
            (other, _), (_, forgotten) = self._kinds.popitem(last=False)
            self._close(other, forgotten)

    def ended(self, replica: str, kind: bytes) -> None:
        """One of that kind has ended there; one that is not known changes nothing."""
        entry = self._kinds.get((replica, kind))
        if entry is None:
            return
        tokens = entry[1] / entry[0]
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
