"""Candidates for eviction: what an entry is worth, and the queue whose least worthy comes first."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

Priority = tuple[int, float, int]
"""(class, value, last use): lower class first, then lower value, then older use."""


class Ticketed(Protocol):
    """An item with the ticket of its one valid entry; 0: it has none."""

    ticket: int


Item = TypeVar("Item", bound=Ticketed)


class LazyHeap(Generic[Item]):
    """A heap with the least priority first, ties in order of insertion.

    Replacing or removing an item leaves a dead entry behind, recognised by its ticket. The heap is
    rebuilt before dead entries outnumber the valid ones by more than a constant. Every operation is
    O(log n) amortised.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Priority, int, Item]] = []
        self._last_ticket = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, item: Item, priority: Priority) -> None:
        """Add `item`, or change its priority."""
        if item.ticket == 0:
            self._size += 1
        self._last_ticket += 1
        item.ticket = self._last_ticket
        heappush(self._entries, (priority, item.ticket, item))
        if len(self._entries) > 2 * self._size + 64:
            self._entries = [entry for entry in self._entries if entry[1] == entry[2].ticket]
            heapify(self._entries)

    def discard(self, item: Item) -> None:
        """Remove `item` if it is in the heap."""
        if item.ticket:
            item.ticket = 0
            self._size -= 1

    def peek(self) -> tuple[Priority, Item] | None:
        """Return the least priority and its item, left in place; None if empty."""
        while self._entries:
            priority, ticket, item = self._entries[0]
            if ticket == item.ticket:
                return priority, item
            heappop(self._entries)
        return None

    def cheapest(self, priority_of: Callable[[Item], Priority]) -> tuple[Priority, Item] | None:
        """Return the item of least priority, left in place, after moving those whose priority has
        grown since; None if empty."""
        while (top := self.peek()) is not None:
            priority, item = top
            current = priority_of(item)
            if current <= priority:
                return current, item
            self.push(item, current)
        return None

    def items(self) -> dict[int, tuple[Priority, Item]]:
        """Return the valid entries by ticket, for `check()`."""
        return {
            ticket: (priority, item)
            for priority, ticket, item in self._entries
            if ticket == item.ticket
        }
