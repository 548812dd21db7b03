"""The interface of a lower tier: an asynchronous store of sealed entries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

from vlm_serve.cache.tiers.entry import EntryId, Sealed

_T = TypeVar("_T")

TIME_LIMIT = 30.0
"""Time limit for one call of a private store, in seconds. Only a broken one takes longer."""
ENTRY_BYTES = 400
"""Memory of what is known of a private store's entry, beside its own bytes."""
READ_LIMIT = 5.0
"""Time limit for a look-up and the read that follows, in seconds, whatever the store's own: a
request waits for it, and could compute instead."""


class Store(Protocol):
    """One tier. Only the stack calls it, on the stack's thread, which an implementation must not
    block. It may raise; the stack counts that and continues without it.

    Attributes:
        name: of the tier, in reports and counters.
        place: its location, for people.
        private: no other process writes or reads it, so bad entries are removed.
        lasting: its content outlives the process.
        time_limit: seconds for one call; for a look-up and the following read together, up to
            READ_LIMIT.
        counters: its own gauges and counters, by name.
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
        """Ensure that it is usable; called first, until it succeeds, and again after a failure.
        Returns the known ids of its entries. Raises OSError."""
        ...

    async def contains(self, ids: Collection[EntryId]) -> set[EntryId]:
        """Return the ids that it holds."""
        ...

    async def get(self, ids: Collection[EntryId]) -> dict[EntryId, Sealed]:
        """Return the entries that it holds, as stored, and mark them as most recently used."""
        ...

    async def put(self, entries: Mapping[EntryId, Sealed]) -> dict[EntryId, Sealed | None]:
        """Store entries; for one that exists, recording the use suffices.

        Returns the entries that it does not hold afterwards: new ones without space, and evicted
        ones, with content where available. They move on to the next tier.
        """
        ...

    async def touch(self, ids: Collection[EntryId]) -> None:
        """Record that entries were in use until now."""
        ...

    async def discard(self, ids: Collection[EntryId]) -> None:
        """Remove entries that are bad. A store that is not private lets the next `put` replace
        them instead."""
        ...

    async def sink(self) -> dict[EntryId, Sealed]:
        """Return and remove all entries at shutdown, least recently used first. Called for
        stores that are not lasting."""
        ...

    async def clear(self) -> None:
        """Remove everything."""
        ...

    async def close(self) -> None: ...


def in_batches(
    items: Iterable[_T], size_of: Callable[[_T], int], num_bytes: int
) -> Iterator[list[_T]]:
    """Yield items in batches of about `num_bytes`, in order."""
    batch, size = list[_T](), 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size >= num_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
