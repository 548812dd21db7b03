"""Counters of the published nodes, a column each: a path of thousands of nodes changes in a few
vector operations, so what a hit costs hardly grows with its prefix."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Collection

Slots = npt.NDArray[np.intp]
"""Slots of nodes `[n]`, in the order of their path."""
NOBODY = 0
_slot_of = attrgetter("slot")


class Slotted(Protocol):
    """A node, as far as the table knows it."""

    slot: int


class NodeTable:
    """Columns by slot. A node has a slot of its own while it is published.

    The slot NOBODY stays 0 in every column: nodes that are not published, or were evicted while a
    reader still had them, read it.

    Attributes:
        pins, parked, hits, last_used, credit, answered: see `Node`.
        blocks: ids of the blocks.
        has_snapshot: whether there is a snapshot at the node's end.
    """

    def __init__(self) -> None:
        self.pins = np.zeros(1, np.int32)
        self.parked = np.zeros(1, np.int32)
        self.hits = np.zeros(1, np.int64)
        self.last_used = np.zeros(1, np.int64)
        self.credit = np.zeros(1, np.float64)
        self.answered = np.zeros(1, np.int32)
        self.blocks = np.zeros(1, np.int32)
        self.has_snapshot = np.zeros(1, np.bool_)
        self._free: list[int] = []

    def add(self, block: int, answered: int) -> int:
        """Return a slot for a node that is being published, with zeros in its other columns."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.blocks[slot] = block
        self.answered[slot] = answered
        return slot

    def remove(self, node: Slotted) -> None:
        """Take an evicted node's slot back."""
        slot, node.slot = node.slot, NOBODY
        for column in self._columns().values():
            column[slot] = 0
        self._free.append(slot)

    def slots(self, path: Collection[Slotted]) -> Slots:
        """Return the slots of published nodes."""
        return np.fromiter(map(_slot_of, path), np.intp, len(path))

    def use(self, slots: Slots, now: int, age: float, hits: int) -> None:
        """Count a use of distinct nodes.

        Args:
            now: counter of uses.
            age: see `Ledger`.
            hits: added to their hits.
        """
        self.hits[slots] += hits
        self.last_used[slots] = now
        self.credit[slots] = age

    def _columns(self) -> dict[str, npt.NDArray[np.generic]]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def _grow(self) -> None:
        size = len(self.pins)
        for name, column in self._columns().items():
            # Readers on other threads keep the column that they have.
            setattr(self, name, np.concatenate([column, np.zeros(size, column.dtype)]))
        self._free.extend(range(2 * size - 1, size - 1, -1))


UNPUBLISHED = NodeTable()
"""The table of nodes before they are published."""
