"""Lower cache tiers for the simulation: digests go down and come up late, damaged or not at all."""

from __future__ import annotations

import logging
import random

import torch
from symbolic import InjectedFailure, SymbolicExecutor

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.ledger import CacheListener
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.cache.tiers.entry import Entry, EntryId, Kind, Origin, Sealed
from vlm_serve.cache.tiers.stack import Found, TierStack
from vlm_serve.engine.tier_down import TierListener
from vlm_serve.engine.tier_transfer import Staged
from vlm_serve.engine.tier_up import Fetch, TierFetcher

DIGEST_BYTES = 12


class FaultyStack(TierStack):
    """Host memory that loses and damages entries."""

    def __init__(self, rng: random.Random, error_rate: float, host_bytes: int) -> None:
        super().__init__(Origin(bytes(32)), host_bytes=host_bytes, background=False)
        self._rng = rng
        self._error_rate = error_rate

    def get(self, entry_id: EntryId) -> Found | None:
        stored = self.host.get(entry_id)
        if stored is not None and self._rng.random() < self._error_rate:
            if self._rng.random() < 0.5:
                self.host.discard(entry_id)
            else:
                damaged = bytearray(stored.payload)
                damaged[self._rng.randrange(len(damaged))] ^= 1
                self.host.put(entry_id, Sealed(stored.header, bytes(damaged)))
        return super().get(entry_id)


class SymbolicTransfer:
    """Copies digests; refuses to read what was freed, and raises now and then when it writes."""

    def __init__(self, rng: random.Random, error_rate: float) -> None:
        self.executors: tuple[SymbolicExecutor, ...] = ()
        self._rng = rng
        self._error_rate = error_rate

    def read_kv(self, block: int, num_tokens: int) -> bytes:
        digests = self.executors[0].kv[block][:num_tokens]
        assert all(len(digest) == DIGEST_BYTES for digest in digests), "freed before it was saved"
        return b"".join(digests)

    def read_state(self, row: int) -> bytes:
        digest = self.executors[0].rows[row]
        assert len(digest) == DIGEST_BYTES, "freed before it was saved"
        return digest

    def layout(self, kind: Kind, num_tokens: int) -> str:
        return f"{kind.name} of {num_tokens if kind is Kind.KV else 1}"

    def stage(self, entry: Entry) -> Staged | None:
        assert entry.layout == self.layout(entry.id.kind, entry.num_tokens)
        return (torch.frombuffer(bytearray(entry.payload), dtype=torch.uint8),)

    def write_kv(self, block: int, staged: Staged) -> None:
        self._strike()
        data = bytes(staged[0].tolist())
        for index in range(len(data) // DIGEST_BYTES):
            digest = data[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            for executor in self.executors:
                executor.kv[block][index] = digest

    def write_state(self, row: int, staged: Staged) -> None:
        self._strike()
        for executor in self.executors:
            executor.rows[row] = bytes(staged[0].tolist())

    def _strike(self) -> None:
        if self._rng.random() < self._error_rate:
            raise InjectedFailure


class SymbolicTiers:
    """A host tier of random size for most seeds. Reading takes a random number of steps.

    Injected failures are no news: the fetcher's log is silent from then on.
    """

    def __init__(self, seed: int, config: CacheConfig, inner: CacheListener) -> None:
        logging.getLogger("vlm_serve.engine.tier_up").setLevel(logging.CRITICAL)
        self._rng = rng = random.Random(f"tiers {seed}")
        error_rate = rng.choice([0.0, 0.01, 0.1])
        host_bytes = rng.choice([0, 0, 3_000, 30_000, 1_000_000])
        self.stack = FaultyStack(rng, error_rate, host_bytes)
        self.transfer = SymbolicTransfer(rng, error_rate / 10)
        self.listener: CacheListener = inner
        self.fetcher: TierFetcher | None = None
        self._reading: list[Fetch] = []
        if host_bytes and config.enabled:
            self.listener = TierListener(
                self.stack,
                self.transfer,
                block_size=config.block_size,
                has_state=config.has_state,
                inner=inner,
            )

    def attach(self, cache: PrefixCache) -> TierFetcher | None:
        """The scheduler's end of the tiers; None for a seed without them."""
        if isinstance(self.listener, TierListener):
            self.fetcher = TierFetcher(cache, self.stack, self.transfer)
        return self.fetcher

    @property
    def busy(self) -> bool:
        return self.fetcher is not None and self.fetcher.busy

    def step(self) -> None:
        """Some of what is being read arrives."""
        if self.fetcher is None:
            return
        self._reading += self.fetcher.starting
        self.fetcher.starting.clear()
        for fetch in list(self._reading):
            if self._rng.random() < 0.5:
                self._reading.remove(fetch)
                self.fetcher.finish(fetch, self.fetcher.read(fetch))
