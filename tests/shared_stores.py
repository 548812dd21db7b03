"""The shared tier over a real store, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis_server import StoreServer
from tier_entries import ORIGIN, entry

from vlm_serve.cache.tiers.entry import Entry, EntryId, Kind, Origin, Sealed, seal
from vlm_serve.cache.tiers.shared import SharedStore
from vlm_serve.cache.tiers.shared_format import Keyring
from vlm_serve.cache.tiers.stack import TierStack

_T = TypeVar("_T")
SIZE = 1000
STATE_SIZE = 9_000_000
"""More than one chunk."""
SECRET = b"s" * 32


def size_of(kind: Kind, num_tokens: int) -> int | None:
    return {Kind.KV: SIZE, Kind.STATE: STATE_SIZE}.get(kind)


class Side:
    """One server's end: a stack of nothing but the shared store."""

    def __init__(
        self,
        server: StoreServer,
        *,
        secret: bytes = SECRET,
        origin: Origin = ORIGIN,
        limit: float = 20.0,
        lifetime: int = 1000,
        rest: float = 0.2,
        connection: dict[str, Any] | None = None,
    ) -> None:
        client = Redis(
            host="127.0.0.1",
            port=server.port,
            retry=Retry(NoBackoff(), 1),
            socket_timeout=None,
            socket_connect_timeout=None,
            protocol=2,
            **(connection or {}),
        )
        self.origin = origin
        self.keys = Keyring(secret, origin)
        self.store = SharedStore(client, self.keys, size_of, time_limit=limit, lifetime=lifetime)
        self.stack = TierStack(origin, [], self.store, rest_seconds=rest)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.stack.submit(work).result(60)

    def sealed(self, *entries: Entry) -> dict[EntryId, Sealed]:
        return {each.id: seal(each, self.origin) for each in entries}

    def share(self, *entries: Entry) -> set[EntryId]:
        """Claims and writes; returns what was claimed."""
        claimed = self.run(self.store.claim([each.id for each in entries]))
        wanted = self.sealed(*(each for each in entries if each.id in claimed))
        if wanted:
            self.run(self.store.put(wanted))
        return claimed

    def located(self, *entries: Entry) -> int:
        return len(self.run(self.stack.locate([each.id for each in entries])))

    def read(self, *entries: Entry) -> int:
        """How many of these come back as they were; look-up and reading as for a request."""
        ids = [each.id for each in entries]
        places = self.run(self.stack.locate(ids))
        found = self.run(self.stack.get(list(places)))
        assert all(found.get(each.id, each) == each for each in entries)
        return len(found)

    def name(self, each: Entry) -> bytes:
        """The key of an entry's manifest."""
        epoch = self.store._epoch
        assert epoch is not None
        return self.keys.name(epoch, each.id)

    def chunk(self, server: StoreServer, each: Entry, index: int = 0) -> bytes:
        """The key of one of its chunks."""
        stored = server.client.get(self.name(each))
        assert isinstance(stored, bytes)
        manifest = self.keys.unpack(self.name(each), stored)
        assert manifest is not None
        return self.keys.chunk_name(manifest.digest, index)

    def __getitem__(self, counter: str) -> int:
        """Of the stack and of the store together."""
        return self.stack.counts[counter] + self.store.counters.get(counter, 0)


@contextmanager
def sides(server: StoreServer, *given: dict[str, Any]) -> Iterator[list[Side]]:
    """Two sides on one store, or as many as there are arguments for."""
    made = [Side(server, **each) for each in given or ({}, {})]
    try:
        yield made
    finally:
        for side in made:
            side.stack.close(5.0)


def kv(*numbers: int) -> list[Entry]:
    return [entry(number, SIZE) for number in numbers]


@cache
def state() -> Entry:
    """One of two chunks."""
    return entry(0, STATE_SIZE, Kind.STATE)


Damage = Callable[[bytes], bytes]
