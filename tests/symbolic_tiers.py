"""Lower cache tiers for the simulation: digests go down and come up late, damaged or not at all."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from queued_symbolic import QueuedSymbolic
from symbolic import InjectedFailure, SymbolicExecutor
from tier_entries import StackInCaller

from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.cache.tier_fetching import Fetch, TierFetcher
from vlm_serve.cache.tiers.down import TierSaver
from vlm_serve.cache.tiers.entry import Entry, EntryId, Kind, Origin, Sealed
from vlm_serve.cache.tiers.host import HostStore
from vlm_serve.engine.core.media_tiers import EmbeddingFetch, EmbeddingForm, EmbeddingTiers

DIGEST_BYTES = 12
CONTENT_BYTES = 32
TOKENS_PER_SPAN = 6


class FaultyStore(HostStore):
    """Host memory that loses and damages entries, and now and then raises."""

    def __init__(self, rng: random.Random, error_rate: float, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._rng = rng
        self._error_rate = error_rate

    async def contains(self, ids: Collection[EntryId]) -> set[EntryId]:
        self._fail()
        return await super().contains(ids)

    async def put(self, entries: Mapping[EntryId, Sealed]) -> dict[EntryId, Sealed | None]:
        self._fail()
        return await super().put(entries)

    async def get(self, ids: Collection[EntryId]) -> dict[EntryId, Sealed]:
        self._fail()
        found = await super().get(ids)
        for entry_id, stored in list(found.items()):
            if self._rng.random() < self._error_rate:
                del found[entry_id]
                if self._rng.random() < 0.5:
                    await self.discard([entry_id])
                else:
                    damaged = bytearray(stored.payload)
                    damaged[self._rng.randrange(len(damaged))] ^= 1
                    found[entry_id] = Sealed(stored.header, bytes(damaged))
        return found

    def _fail(self) -> None:
        if self._rng.random() < self._error_rate / 10:
            raise InjectedFailure


class SymbolicTransfer:
    """Copies digests; refuses to read what was freed, and raises now and then when it writes."""

    def __init__(self, rng: random.Random, error_rate: float) -> None:
        self.executors: tuple[SymbolicExecutor | QueuedSymbolic, ...] = ()
        self._rng = rng
        self._error_rate = error_rate

    def read_kv(self, block: int, num_tokens: int) -> bytes:
        (digests,) = {tuple(each.read_kv(block, num_tokens)) for each in self.executors}
        assert all(len(digest) == DIGEST_BYTES for digest in digests), "freed before it was saved"
        return b"".join(digests)

    def read_state(self, row: int) -> bytes:
        (digest,) = {each.read_state(row) for each in self.executors}
        assert len(digest) == DIGEST_BYTES, "freed before it was saved"
        return digest

    def num_bytes(self, kind: Kind, num_tokens: int) -> int | None:
        return None

    def layout(self, kind: Kind, num_tokens: int) -> str:
        return f"{kind.name} of {num_tokens if kind is Kind.KV else 1}"

    def stage(self, entry: Entry) -> tuple[torch.Tensor, ...]:
        assert entry.layout == self.layout(entry.id.kind, entry.num_tokens)
        return (torch.frombuffer(bytearray(entry.payload), dtype=torch.uint8),)

    def write_kv(self, block: int, staged: tuple[torch.Tensor, ...]) -> None:
        self._strike()
        data = bytes(staged[0].tolist())
        ends = range(DIGEST_BYTES, len(data) + 1, DIGEST_BYTES)
        for executor in self.executors:
            executor.write_kv(block, [data[end - DIGEST_BYTES : end] for end in ends])

    def write_state(self, row: int, staged: tuple[torch.Tensor, ...]) -> None:
        self._strike()
        for executor in self.executors:
            executor.write_state(row, bytes(staged[0].tolist()))

    def _strike(self) -> None:
        if self._rng.random() < self._error_rate:
            raise InjectedFailure


@contextmanager
def silence() -> Iterator[None]:
    """Keep the tiers from logging inside the block: injected failures are no news."""
    log = logging.getLogger("vlm_serve.cache.tiers")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


class SymbolicTiers:
    """One or two host tiers of random size for most seeds. Reading takes a random number of
    steps."""

    def __init__(self, seed: int, cache: PrefixCache) -> None:
        self._rng = rng = random.Random(f"tiers {seed}")
        error_rate = rng.choice([0.0, 0.01, 0.1])
        sizes = rng.choice([(), (), (3_000,), (3_000, 30_000), (1_000_000,)])
        self.stores = [FaultyStore(rng, error_rate, size) for size in sizes]
        self.transfer = SymbolicTransfer(rng, error_rate / 10)
        self.fetcher: TierFetcher | None = None
        self.embeddings: EmbeddingTiers | None = None
        self.counts: Counter[str] = Counter()
        self._cache = cache
        self._reading: list[Fetch] = []
        self._reading_embeddings: list[EmbeddingFetch] = []
        if self.stores and cache.config.enabled:
            self.stack = StackInCaller(Origin(bytes(32)), self.stores)
            self.counts = self.stack.counts
            self.saver = TierSaver(self.stack, self.transfer, cache.config, cache.ledger.marks)
            self.saver.listen(cache.events)
            self.fetcher = TierFetcher(cache, self.stack, self.transfer)
            form = EmbeddingForm(CONTENT_BYTES, torch.uint8)
            self.embeddings = EmbeddingTiers(self.stack, form, self._embedding)
            self.embeddings.ahead = rng.random() < 0.5

    @property
    def busy(self) -> bool:
        busy = self.embeddings is not None and self.embeddings.busy
        return busy or (self.fetcher is not None and self.fetcher.busy)

    def step(self) -> None:
        """Some of what is being read arrives."""
        if self.fetcher is None or self.embeddings is None:
            return
        self._reading += self.fetcher.starting
        self.fetcher.starting.clear()
        for fetch in list(self._reading):
            if self._rng.random() < 0.5:
                self._reading.remove(fetch)
                self.fetcher.finish(fetch, self.stack.submit(self.fetcher.read(fetch)).result())
        self._reading_embeddings += self.embeddings.starting
        self.embeddings.starting.clear()
        for wanted in list(self._reading_embeddings):
            if self._rng.random() < 0.5:
                self._reading_embeddings.remove(wanted)
                found = self.stack.submit(self.embeddings.read(wanted)).result()
                self.embeddings.finish(wanted, found)

    def _embedding(self, slot: int) -> torch.Tensor | None:
        content = self.transfer.executors[0].embedding(slot)
        if content is None:
            return None
        return torch.tensor(list(content), dtype=torch.uint8).repeat(TOKENS_PER_SPAN, 1)

    def close(self) -> None:
        if self.fetcher is not None:
            self.stack.close()
