"""Several stores in a row, and ones that are slow, raise, are full or hold what others wrote."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Iterator, Mapping

import pytest
from tier_entries import ORIGIN, StackInCaller, entry, get, locate, sealed

from vlm_serve.cache.tiers.entry import EntryId, Origin, Sealed, seal
from vlm_serve.cache.tiers.host import HostStore
from vlm_serve.cache.tiers.stack import TierStack

SIZE = entry(0).num_bytes


class SharedStore(HostStore):
    """A store that others use too, and that can be told to misbehave."""

    name = "shared"
    private = False
    lasting = True
    time_limit = 60.0

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        super().__init__(max_bytes)
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.calls: list[str] = []
        self.threads: set[int] = set()

    async def contains(self, ids: Collection[EntryId]) -> set[EntryId]:
        await self._begin("contains")
        return await super().contains(ids)

    async def get(self, ids: Collection[EntryId]) -> dict[EntryId, Sealed]:
        await self._begin("get")
        return await super().get(ids)

    async def put(self, entries: Mapping[EntryId, Sealed]) -> dict[EntryId, Sealed | None]:
        await self._begin("put")
        return await super().put(entries)

    async def discard(self, ids: Collection[EntryId]) -> None:
        """Leave other servers' entries where they are."""
        self.calls.append("discard")

    async def _begin(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.get_ident())
        while not self.gate.is_set():
            await asyncio.sleep(0.005)
        if self.error is not None:
            raise self.error


@pytest.fixture
def shared() -> SharedStore:
    return SharedStore()


@pytest.fixture
def tiers(shared: SharedStore) -> Iterator[TierStack]:
    """Room for two entries in front of the shared store."""
    stack = TierStack(ORIGIN, [HostStore(2 * SIZE), shared], rest_seconds=600.0)
    yield stack
    stack.close()


def put(tiers: TierStack, *numbers: int) -> None:
    for number in numbers:
        tiers.put(entry(number))
        assert tiers.drain(60)


def test_what_one_store_gives_up_moves_on_to_the_next() -> None:
    stores = [HostStore(2 * SIZE), SharedStore(3 * SIZE), SharedStore(SIZE)]
    for store, name in zip(stores, "abc", strict=True):
        store.name = name
    tiers = StackInCaller(ORIGIN, stores)
    for number in range(7):
        tiers.put(entry(number))
    assert locate(tiers, *range(7)) == [None, "c", "b", "b", "b", "a", "a"]
    assert [tiers.holds(entry(number).id) for number in range(7)] == [False] + [True] * 6
    assert all(get(tiers, number) == entry(number) for number in range(1, 7))
    assert (tiers.counts["evicted_a"], tiers.counts["dropped"]) == (5, 1)
    tiers.sink()
    assert len(stores[0]) == 0 and locate(tiers, 5, 6) == ["b", "b"]
    tiers.close()


def test_stores_are_called_on_the_stacks_own_thread(tiers: TierStack, shared: SharedStore) -> None:
    put(tiers, 0, 1, 2)
    tiers.touch(entry(0).id)
    assert locate(tiers, 0) == ["shared"]
    assert tiers.holds(entry(0).id) and not tiers.holds(entry(9).id)
    assert len(shared.threads) == 1 and threading.get_ident() not in shared.threads


def test_a_slow_store_costs_its_time_limit_and_is_then_left_alone(
    tiers: TierStack, shared: SharedStore
) -> None:
    put(tiers, 0, 1, 2)
    shared.gate.clear()
    shared.time_limit = 0.05
    began = time.monotonic()
    assert locate(tiers, 0, 1, 2) == [None, "host", "host"]
    assert time.monotonic() - began >= 0.05
    shared.calls.clear()
    assert get(tiers, 0) is None and get(tiers, 2) == entry(2)
    assert not shared.calls, "it is left alone"
    assert tiers.counts["failed_shared"] == 1
    shared.gate.set()
    shared.time_limit = 60.0
    tiers.caller._breakers[shared]._open_until = 0.0  # it has rested
    assert get(tiers, 0) == entry(0)


def test_putting_never_waits_for_a_slow_store(tiers: TierStack, shared: SharedStore) -> None:
    shared.gate.clear()
    for number in range(10):
        tiers.put(entry(number))
    assert not tiers.drain(0), "the store has not even answered"
    shared.error = OSError("injected")
    shared.gate.set()
    assert tiers.drain(60)
    assert tiers.counts["dropped"] == 8 and tiers.counts["failed_shared"] >= 1
    assert not tiers.holds(entry(0).id) and tiers.holds(entry(9).id)


def test_a_store_that_raises_is_counted_and_the_next_one_serves(shared: SharedStore) -> None:
    shared.error = OSError("injected")
    behind = HostStore(10 * SIZE)
    tiers = TierStack(ORIGIN, [shared, behind])
    put(tiers, 0, 1)
    assert locate(tiers, 0, 1) == ["host", "host"]
    assert get(tiers, 1) == entry(1)
    assert tiers.counts["failed_shared"] == 1 and len(behind) == 2
    tiers.close()


def test_a_full_store_refuses_and_still_reads(tiers: TierStack, shared: SharedStore) -> None:
    shared.max_bytes = SIZE

    async def refuse(entries: Mapping[EntryId, Sealed]) -> dict[EntryId, Sealed | None]:
        return dict(entries)

    put(tiers, 0, 1, 2)
    shared.put = refuse  # type: ignore[method-assign]
    put(tiers, 3, 4)
    assert locate(tiers, 0, 1, 2) == ["shared", None, None]
    assert get(tiers, 0) == entry(0)
    assert tiers.counts["dropped"] == 2


def test_foreign_and_damaged_entries_are_misses_and_stay(
    tiers: TierStack, shared: SharedStore
) -> None:
    foreign = seal(entry(0), Origin(bytes(32)))
    (damaged,) = sealed(1).values()
    bad = {
        entry(0).id: foreign,
        entry(1).id: Sealed(damaged.header, b"x" + damaged.payload[1:]),
        entry(2).id: next(iter(sealed(3).values())),
    }
    tiers.submit(shared.put(bad)).result()
    for number in range(3):
        assert locate(tiers, number) == ["shared"]
        assert get(tiers, number) is None
        assert not tiers.holds(entry(number).id), "it is written again when it is evicted"
    assert tiers.counts["bad"] == 3 and shared.calls.count("discard") == 3
    assert tiers.submit(shared.contains(bad)).result() == bad.keys(), "nobody's to delete"


def test_a_bad_entry_of_our_own_is_removed() -> None:
    host = HostStore(1 << 20)
    tiers = StackInCaller(ORIGIN, [host])
    tiers.submit(host.put({entry(0).id: next(iter(sealed(1).values()))})).result()
    assert get(tiers, 0) is None and len(host) == 0
    tiers.close()


def test_flushing_forgets_at_once_and_everywhere(tiers: TierStack, shared: SharedStore) -> None:
    put(tiers, 0, 1, 2)
    removed = tiers.clear()
    assert not any(tiers.holds(entry(number).id) for number in range(3))
    removed.result(10)
    assert locate(tiers, 0, 1, 2) == [None] * 3 and len(shared) == 0
    put(tiers, 0)
    assert locate(tiers, 0) == ["host"]


def test_closing_does_not_wait_for_what_is_being_read(shared: SharedStore) -> None:
    tiers = TierStack(ORIGIN, [shared])
    shared.gate.clear()
    reading = tiers.submit(tiers.get([entry(0).id]))
    tiers.close(timeout=1.0)
    assert reading.cancelled() and not shared.gate.is_set()
