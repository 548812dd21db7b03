"""What a lower tier is: a place for sealed entries, asked and answered asynchronously."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from vlm_serve.cache.tiers.entry import EntryId, Sealed

TIME_LIMIT = 30.0
"""Seconds that a store of our own may take for one call. Only a broken one takes longer."""


class Store(Protocol):
    """One tier. Only the stack calls it, on the stack's thread, which an implementation must not
    block: whatever waits is awaited. It may raise; the stack counts that and goes on without it.

    Attributes:
        name: of the tier, in reports and counters.
        place: where it is, for people.
        private: nobody else writes or reads it, so that bad entries are removed.
        lasting: its content outlives the process.
        time_limit: seconds that a call may take; of a look-up and the reading that follows,
            together.
        counters: gauges and counters of its own, by name.
    """

    @property
    def name(self) -> str: ...
    @property
    def place(self) -> str: ...
    @property
    def private(self) -> bool: ...
    @property
    def lasting(self) -> bool: ...
    @property
    def time_limit(self) -> float: ...
    @property
    def counters(self) -> Mapping[str, int]: ...

    async def open(self) -> Collection[EntryId]:
        """Makes sure that it can be used; called before anything else, until it has succeeded, and
        again after a failure. Returns ids that it is known to hold. Raises OSError."""
        ...

    async def contains(self, ids: Collection[EntryId]) -> set[EntryId]:
        """Those that it holds."""
        ...

    async def get(self, ids: Collection[EntryId]) -> dict[EntryId, Sealed]:
        """Those that it holds, as they were stored; the most recently used ones from now on."""
        ...

    async def put(self, entries: Mapping[EntryId, Sealed]) -> dict[EntryId, Sealed | None]:
        """Stores entries; of one that it holds already it is enough to note the use.

        Returns what it does not hold afterwards: new ones that it had no room for, and what had to
        go for the others. With content where that is at hand: it moves on to the next tier.
        """
        ...

    async def touch(self, ids: Collection[EntryId]) -> None:
        """They were in use until now."""
        ...

    async def delete(self, ids: Collection[EntryId]) -> None:
        """Removes entries; called for private stores alone."""
        ...

    async def doubt(self, ids: Collection[EntryId]) -> None:
        """Entries that it gave out were bad: it replaces them when it is given them again. Called
        for stores that are not private."""
        ...

    async def sink(self) -> dict[EntryId, Sealed]:
        """Shutdown of a store that is not lasting: all it holds, least recently used first. It is
        empty afterwards."""
        ...

    async def clear(self) -> None:
        """Removes everything."""
        ...

    async def close(self) -> None: ...
