"""A host tier below the benchmark's cache: entries of counted bytes, read between two steps."""

from __future__ import annotations

from tier_entries import StackInCaller

from benchmarks.common.reuse_shape import BLOCK_BYTES, BLOCK_SIZE, STATE_BYTES
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.cache.tier_fetching import TierFetcher
from vlm_serve.cache.tiers.down import TierSaver
from vlm_serve.cache.tiers.entry import Entry, Kind, Origin
from vlm_serve.cache.tiers.host import HostStore

SCALE = 1024
"""Bytes that one byte of an entry stands for. Headers, about 170 bytes each, are not scaled: they
take some 8 % of such a tier."""


class CountedTransfer:
    """Copies nothing: entries have their size, and no content."""

    def read_kv(self, block: int, num_tokens: int) -> bytes:
        return bytes(BLOCK_BYTES * num_tokens // BLOCK_SIZE // SCALE)

    def read_state(self, row: int) -> bytes:
        return bytes(STATE_BYTES // SCALE)

    def layout(self, kind: Kind, num_tokens: int) -> str:
        return kind.name

    def num_bytes(self, kind: Kind, num_tokens: int) -> int | None:
        return None

    def stage(self, entry: Entry) -> Entry:
        return entry

    def write_kv(self, block: int, staged: Entry) -> None:
        pass

    def write_state(self, row: int, staged: Entry) -> None:
        pass


class HostTier:
    """Host memory below a cache: entries that leave it come back for a prompt that shares them.

    Args:
        cache: the cache above.
        num_bytes: of the tier, headers included.

    Attributes:
        fetcher: for the features of the scheduler.
    """

    def __init__(self, cache: PrefixCache, num_bytes: int) -> None:
        transfer = CountedTransfer()
        self._stack = StackInCaller(Origin(bytes(32)), [HostStore(num_bytes // SCALE)])
        TierSaver(self._stack, transfer, cache.config, cache.ledger.marks).listen(cache.events)
        self.fetcher = TierFetcher(cache, self._stack, transfer)

    @property
    def busy(self) -> bool:
        """True while prompts wait for entries."""
        return self.fetcher.busy

    def step(self) -> None:
        """Finish every read that has been asked for."""
        starting, self.fetcher.starting = self.fetcher.starting, []
        for fetch in starting:
            self.fetcher.finish(fetch, self._stack.submit(self.fetcher.read(fetch)).result())

    def close(self) -> None:
        self._stack.close()
