"""Which unpinned entry is worth least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Use:
    """What a policy may know about an entry.

    Attributes:
        last_used: counter at its last use.
        credit: the policy's age at its last use.
        saved_tokens: tokens whose recomputation the entry saves.
        reuse: how often it was used, its making included.
        num_bytes: what evicting it frees.
    """

    last_used: int
    credit: float
    saved_tokens: int
    reuse: int
    num_bytes: int


class EvictionPolicy(Protocol):
    """Gives entries a value; the least valuable one is evicted first."""

    age: float
    """Remembered as an entry's credit whenever it is used."""

    def value(self, use: Use) -> float: ...

    def evicted(self, value: float) -> None:
        """An entry of this value was evicted."""
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

    The age rises to the value of each victim and is added to what is used from then on, so that an
    entry that was worth much long ago gives way in the end. No clock is needed.
    """

    def __init__(self) -> None:
        self.age = 0.0

    def value(self, use: Use) -> float:
        return use.credit + use.saved_tokens * use.reuse / use.num_bytes

    def evicted(self, value: float) -> None:
        self.age = max(self.age, value)


def make_policy(name: Literal["value", "lru"]) -> EvictionPolicy:
    return ValuePolicy() if name == "value" else LruPolicy()
