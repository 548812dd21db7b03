"""Eviction policies: which unpinned entry is worth least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Use:
    """The facts about an entry that a policy may use.

    Attributes:
        last_used: counter at its last use.
        credit: the policy's age at its last use.
        saved_tokens: tokens that need no recomputation thanks to the entry.
        reuse: number of uses, and the expected one that its creation stands for.
        num_bytes: bytes that its eviction frees.
    """

    last_used: int
    credit: float
    saved_tokens: int
    reuse: float
    num_bytes: int


class EvictionPolicy(Protocol):
    """Rates entries; the least valuable one is evicted first."""

    age: float
    """Stored as an entry's credit at each use."""

    def value(self, use: Use) -> float: ...

    def evicted(self, value: float) -> None:
        """Record that an entry of this value was evicted."""
        ...


class LruPolicy:
    """Least recently used first."""

    def __init__(self) -> None:
        self.age = 0.0

    def value(self, use: Use) -> float:
        return float(use.last_used)

    def evicted(self, value: float) -> None:
        pass


class ValuePolicy:
    """Recompute saved x reuse / bytes, aged: Greedy-Dual-Size-Frequency (Cherkasova, 1998).

    The age rises to the value of each victim and is added to every later use. An entry of great
    value long ago is therefore evicted eventually. No clock is needed.
    """

    def __init__(self) -> None:
        self.age = 0.0

    def value(self, use: Use) -> float:
        return use.credit + use.saved_tokens * use.reuse / use.num_bytes

    def evicted(self, value: float) -> None:
        self.age = max(self.age, value)


def make_policy(name: Literal["value", "lru"]) -> EvictionPolicy:
    return ValuePolicy() if name == "value" else LruPolicy()
