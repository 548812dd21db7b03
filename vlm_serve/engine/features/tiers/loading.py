"""Lower cache tiers of an engine: created from options, used between steps, saved at the end."""

from __future__ import annotations

import errno
import logging
import stat
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.cache.tier_fetching import Fetch, TierFetcher, TierReading
from vlm_serve.cache.tiers.deferred import DeferredStore
from vlm_serve.cache.tiers.disk import DiskStore
from vlm_serve.cache.tiers.down import TierSaver
from vlm_serve.cache.tiers.entry import Kind, Origin
from vlm_serve.cache.tiers.host import HostStore
from vlm_serve.cache.tiers.sharing import POLICIES, Sharer
from vlm_serve.cache.tiers.stack import TierStack
from vlm_serve.cache.tiers.store import Store
from vlm_serve.cache.tiers.transfer import Transfer
from vlm_serve.engine.core.hooks import Loop
from vlm_serve.engine.core.media_tiers import (
    EmbeddingFetch,
    EmbeddingForm,
    EmbeddingHit,
    EmbeddingTiers,
)
from vlm_serve.engine.features.tiers.shared_store import SharedAddress
from vlm_serve.errors import ConfigError, EngineClosedError
from vlm_serve.options.config import EngineConfig

SHUTDOWN_SECONDS = 20.0
"""Time limit for saving the device's cache when the engine ends."""

_NEVER_A_FOLDER = (errno.ENOTDIR, errno.ENAMETOOLONG)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tiers:
    """Tier stack of an engine, with the saver, the fetcher and, for a shared store, the sharer."""

    stack: TierStack
    saver: TierSaver
    fetcher: TierFetcher
    sharer: Sharer | None = None


def make_tiers(
    config: EngineConfig,
    cache: PrefixCache,
    transfer: Transfer,
    model: bytes,
    *,
    form: EmbeddingForm | None = None,
    address: SharedAddress | None = None,
    promised: bool = True,
) -> Tiers | None:
    """Create the tiers that the options request. Tiers that are not usable yet are retried later.

    Raises ConfigError if one can never be used: the disk tier has no folder, or memory is too
    small.

    Args:
        model: 32 bytes that identify config, types and numerics; keys of entries name the weights.
        form: shape and type of the embeddings; None for a model without a vision tower.
        address: address of the shared store; None if there is none.
        promised: True if a hit has the bits of a cold run whatever made the entries.
    """
    host_bytes, disk_bytes = config.host_cache_memory, config.disk_cache_size
    assert isinstance(host_bytes, int) and isinstance(disk_bytes, int)
    stores: list[Store] = [HostStore(host_bytes)] if host_bytes else []
    folder = disk_folder(config)
    if folder is not None:
        stores.append(DeferredStore("disk", str(folder), partial(DiskStore, folder, disk_bytes)))
    if not (stores or address) or not config.enable_prefix_caching:
        return None
    origin = Origin(model, world=config.tensor_parallel_size)
    shared = None
    if address is not None:
        shared = address.open(config, origin, partial(_num_bytes, transfer, form))
    stack = TierStack(origin, stores, shared)
    saver = TierSaver(stack, transfer, cache.config, cache.ledger.marks)
    if stores:
        saver.listen(cache.events)
    sharer = None
    if shared is not None:
        bandwidth = config.shared_store_write_bandwidth
        assert isinstance(bandwidth, int)
        sharer = Sharer(
            stack,
            shared,
            transfer,
            cache.ledger.marks,
            kinds=POLICIES[config.shared_store_write],
            exact_only=not promised,
            bandwidth=bandwidth,
            has_state=cache.config.has_state,
        )
        sharer.listen(cache.events)
        stack.share = sharer.offer
    return Tiers(stack, saver, TierFetcher(cache, stack, transfer), sharer)


def disk_folder(config: EngineConfig) -> Path | None:
    """Return the folder of the disk tier, if the options request one. It need not exist.

    Raises ConfigError if it can never exist: a file has its name.
    """
    if not config.enable_prefix_caching or config.disk_cache_path is None:
        return None
    problem = None
    try:
        folder = Path(config.disk_cache_path).expanduser()
        if not stat.S_ISDIR(folder.stat().st_mode):
            problem = f"{folder} is not a folder"
    except (ValueError, RuntimeError) as error:
        problem = str(error)
    except OSError as error:
        problem = str(error) if error.errno in _NEVER_A_FOLDER else None
    if problem is not None:
        raise ConfigError(f"disk_cache_path cannot be used: {problem}", param="disk_cache_path")
    return folder


def _num_bytes(
    transfer: Transfer, form: EmbeddingForm | None, kind: Kind, num_tokens: int
) -> int | None:
    """Return the bytes of an entry's payload; None if the layout does not determine it."""
    if kind is Kind.EMBEDDINGS and form is not None:
        return num_tokens * form.token_bytes
    return transfer.num_bytes(kind, num_tokens)


class TierLoading:
    """Runs the tier requests of waiting sequences. Without tiers it only flushes the device's
    cache, and hangs on no hook.

    Args:
        cache: prefix cache on the device.
        tiers: lower tiers; None if there are none.
        embeddings: lower tiers for media embeddings; None for a model without a vision tower.
    """

    def __init__(
        self, cache: PrefixCache, tiers: Tiers | None, embeddings: EmbeddingTiers | None = None
    ) -> None:
        self._cache = cache
        self._tiers = tiers
        self._embeddings = embeddings

    def attach(self, loop: Loop) -> None:
        """Publish on the engine's thread what has been loaded."""
        self._post = loop.post
        if self._tiers is not None and self._tiers.sharer is not None:
            self._tiers.sharer.post = self._post_if_open

    def is_busy(self) -> bool:
        """Return True while something is being loaded."""
        assert self._tiers is not None, "without tiers nothing calls this"
        return self._tiers.fetcher.busy or (self._embeddings is not None and self._embeddings.busy)

    def on_planned(self) -> None:
        """Submit the fetches that were requested since the last call."""
        assert self._tiers is not None, "without tiers nothing calls this"
        fetcher = self._tiers.fetcher
        starting, fetcher.starting = fetcher.starting, []
        for fetch in starting:
            self._tiers.stack.submit(self._load(fetcher, fetch))
        if self._embeddings is not None:
            fetches, self._embeddings.starting = self._embeddings.starting, []
            for wanted in fetches:
                self._tiers.stack.submit(self._load_embeddings(self._embeddings, wanted))

    def flush(self) -> Future[None] | None:
        """Drop everything that no running request holds, in every tier. Entries are invisible at
        once; the future completes when they are removed."""
        if self._tiers is None:
            self._cache.flush()
            return None
        with self._tiers.saver.silenced():
            self._cache.flush()
        self._tiers.fetcher.forget()
        if self._tiers.sharer is not None:
            self._tiers.sharer.forget()
        if self._embeddings is not None:
            self._embeddings.forget()
        return self._tiers.stack.clear()

    def sink(self, seconds: float = SHUTDOWN_SECONDS) -> None:
        """Empty the device's cache while no request holds anything. Its content goes to the tiers,
        as far as they take it within so many seconds."""
        if self._tiers is None:
            self._cache.empty()
            return
        deadline = time.monotonic() + seconds
        for node in self._cache.nodes():
            self._tiers.saver.save(node, max(0.0, deadline - time.monotonic()))
        with self._tiers.saver.silenced():
            self._cache.empty()

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes of the tiers; empty without tiers."""
        if self._tiers is None:
            return {}
        stack = self._tiers.stack
        gauges = {
            f"{store.name}_{name}": value
            for store in stack.stores
            for name, value in (("up", int(stack.caller.is_up(store))), *store.counters.items())
        }
        return {"counts": dict(stack.counts), **gauges}

    def close(self) -> None:
        """Save the content of host memory and device to persistent tiers, if any. Never raise."""
        if self._tiers is None:
            return
        stack = self._tiers.stack
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        try:
            if stack.lasting:
                stack.sink(lambda: time.monotonic() < deadline - SHUTDOWN_SECONDS / 2)
                for node in self._cache.nodes():
                    left = deadline - time.monotonic()
                    if left <= 0:
                        _log.warning("the disk tier is too slow to save all of the cache")
                        break
                    self._tiers.saver.save(node, left)
            stack.close(max(0.0, deadline - time.monotonic()))
        except Exception:
            _log.exception("the lower cache tiers could not be closed properly")

    async def _load(self, fetcher: TierFetcher, fetch: Fetch) -> None:
        reading: TierReading | None = None
        try:
            reading = await fetcher.read(fetch)
        except Exception:
            _log.exception("a lower cache tier could not be read")
        self._post_if_open(lambda: fetcher.finish(fetch, reading))

    def _post_if_open(self, command: Callable[[], None]) -> None:
        with suppress(EngineClosedError):
            self._post(command)

    async def _load_embeddings(self, embeddings: EmbeddingTiers, fetch: EmbeddingFetch) -> None:
        fetched: dict[bytes, EmbeddingHit] | None = None
        try:
            fetched = await embeddings.read(fetch)
        except Exception:
            _log.exception("embeddings could not be read from a lower cache tier")
        self._post_if_open(lambda: embeddings.finish(fetch, fetched))
