"""Rendezvous hashing (Thaler and Ravishankar, 1998): routers agree on a key's replicas without
talking, and a replica that comes or goes moves no more than its own share of keys."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable

_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15
MAX_REPLICAS_REMEMBERED = 4096


class Rendezvous:
    """Ranks replicas for a key. Remembers the numbers of at most MAX_REPLICAS_REMEMBERED ids."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def first(self, key: bytes, ids: Iterable[str], count: int) -> list[str]:
        """The `count` replicas that rank highest for a key, highest first."""
        base = _number(key)
        return heapq.nlargest(count, ids, key=lambda each: self.weight(base, each))

    def weight(self, base: int, replica: str) -> int:
        """Of a replica for a key's number."""
        number = self._numbers.get(replica)
        if number is None:
            if len(self._numbers) >= MAX_REPLICAS_REMEMBERED:
                self._numbers.clear()
            number = self._numbers[replica] = _number(replica.encode("utf-8", "surrogatepass"))
        mixed = ((base ^ number) * _MIX) & _MASK
        mixed ^= mixed >> 32
        return ((mixed * _MIX) & _MASK) ^ (mixed >> 29)


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
