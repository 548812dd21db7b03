"""The lower cache tiers of an engine: made from its options, read by a thread, saved at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.ledger import CacheListener, SilentListener
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.cache.tiers.disk import DiskStore
from vlm_serve.cache.tiers.entry import Origin
from vlm_serve.cache.tiers.stack import TierStack
from vlm_serve.config import EngineConfig
from vlm_serve.engine.tier_down import TierListener
from vlm_serve.engine.tier_transfer import Transfer
from vlm_serve.engine.tier_up import Fetch, Reading, TierFetcher
from vlm_serve.errors import ConfigError, EngineClosedError

SHUTDOWN_SECONDS = 20.0
"""How long the end of an engine may take to save what the device holds."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tiers:
    """What `build` makes; `fetcher` needs the cache, which needs the listener."""

    stack: TierStack
    listener: TierListener
    transfer: Transfer

    def fetcher(self, cache: PrefixCache) -> TierFetcher:
        return TierFetcher(cache, self.stack, self.transfer)


def make_tiers(
    config: EngineConfig,
    cache_config: CacheConfig,
    transfer: Transfer,
    model: bytes,
    inner: CacheListener | None,
) -> Tiers | None:
    """The tiers that the options ask for, if any.

    Args:
        config: options.
        cache_config: of the cache above.
        transfer: reads and writes the pools.
        model: 32 bytes that identify weights, types and numerics.
        inner: another listener of the cache.

    Raises:
        ConfigError: the folder of the disk tier cannot be written.
    """
    host_bytes, disk_bytes = config.host_cache_memory, config.disk_cache_size
    assert isinstance(host_bytes, int) and isinstance(disk_bytes, int)
    if not config.enable_prefix_caching or not (host_bytes or config.disk_cache_path):
        return None
    disk = None
    if config.disk_cache_path is not None:
        try:
            disk = DiskStore(Path(config.disk_cache_path).expanduser(), disk_bytes)
        except OSError as error:
            raise ConfigError(
                f"disk_cache_path cannot be used: {error}", param="disk_cache_path"
            ) from error
    stack = TierStack(Origin(model), host_bytes=host_bytes, disk=disk)
    listener = TierListener(
        stack,
        transfer,
        block_size=cache_config.block_size,
        has_state=cache_config.has_state,
        inner=inner or SilentListener(),
    )
    return Tiers(stack, listener, transfer)


class TierLoading:
    """Reads what waiting sequences ask for; does nothing in an engine without tiers.

    Args:
        tiers: None: there are none.
        fetcher: says what is to be read.
        post: runs a function on the engine's thread.
    """

    def __init__(
        self,
        tiers: Tiers | None,
        fetcher: TierFetcher | None,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._tiers = tiers
        self._fetcher = fetcher
        self._post = post
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vlm-serve-fetch")

    @property
    def busy(self) -> bool:
        return self._fetcher is not None and self._fetcher.busy

    def start(self) -> None:
        """Begins to read what has been asked for since the last call."""
        if self._fetcher is None:
            return
        for fetch in self._fetcher.starting:
            self._pool.submit(self._load, fetch, self._fetcher)
        self._fetcher.starting.clear()

    def flush(self, cache: PrefixCache) -> None:
        """Forgets everything that no running request holds, in every tier."""
        if self._tiers is None or self._fetcher is None:
            cache.flush()
            return
        with self._tiers.listener.silenced():
            cache.flush()
        self._fetcher.forget()
        self._tiers.stack.clear()

    def stats(self) -> dict[str, Any]:
        """Counters and sizes of the tiers; empty without them."""
        if self._tiers is None:
            return {}
        stack = self._tiers.stack
        stats: dict[str, Any] = {"counts": dict(stack.counts), "host_bytes": stack.host.num_bytes}
        if stack.disk is not None:
            disk = stack.disk
            stats |= {
                "disk_bytes": disk.num_bytes,
                "disk_errors": disk.errors,
                "disk_evictions": disk.evictions,
            }
        return stats

    def close(self, cache: PrefixCache) -> None:
        """Saves what host memory and the device hold to the disk, if there is one; never raises."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._tiers is None:
            return
        stack, listener = self._tiers.stack, self._tiers.listener
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        try:
            if stack.disk is not None:
                stack.sink(lambda: time.monotonic() < deadline - SHUTDOWN_SECONDS / 2)
                for node in cache.nodes():
                    left = deadline - time.monotonic()
                    if left <= 0:
                        _log.warning("the disk tier is too slow to save all of the cache")
                        break
                    listener.save(node, left)
            stack.close(max(0.0, deadline - time.monotonic()))
        except Exception:
            _log.exception("the lower cache tiers could not be closed properly")

    def _load(self, fetch: Fetch, fetcher: TierFetcher) -> None:
        reading: Reading | None = None
        try:
            reading = fetcher.read(fetch)
        except Exception:
            _log.exception("a lower cache tier could not be read")
        with suppress(EngineClosedError):
            self._post(lambda: fetcher.finish(fetch, reading))
