"""Rendezvous hashing (Thaler and Ravishankar, 1998): routers agree on the replicas of a key.

They need no communication. When a replica joins or leaves, only its own share of keys moves.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable

_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15
MAX_REPLICAS_REMEMBERED = 4096


class RendezvousHash:
    """Ranks replicas for a key. Caches the hashes of at most MAX_REPLICAS_REMEMBERED ids."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def first(self, key: bytes, ids: Iterable[str], count: int) -> list[str]:
        """Return the `count` replicas with the highest weight for a key, highest first."""
        weights = self.weights(key, ids)
        return heapq.nlargest(count, weights, key=weights.__getitem__)

    def weights(self, key: bytes, ids: Iterable[str]) -> dict[str, int]:
        """Return the weights of replicas for a key."""
        base, numbers, weights = _number(key), self._numbers, dict[str, int]()
        for replica in ids:
            number = numbers.get(replica)
            if number is None:
                number = self._remember(replica)
            mixed = ((base ^ number) * _MIX) & _MASK
            weights[replica] = ((mixed ^ (mixed >> 32)) * _MIX) & _MASK
        return weights

    def _remember(self, replica: str) -> int:
        if len(self._numbers) >= MAX_REPLICAS_REMEMBERED:
            self._numbers.clear()
        number = self._numbers[replica] = _number(replica.encode("utf-8", "surrogatepass"))
        return number


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
