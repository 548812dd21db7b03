"""Upkeep while a server is quiet: checking the cache's invariants, and returning memory to the
system.

glibc never returns freed memory between blocks in use, so a server would keep its peak size.
Reference cycles, such as a failed request's traceback, stay until the garbage collector runs, and a
quiet server does not trigger it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vlm_serve.errors import EngineClosedError
from vlm_serve.server.http.admission import OpenRequests
from vlm_serve.system.host_memory import release_freed_memory

if TYPE_CHECKING:
    from vlm_serve.engine.engine import Engine

_log = logging.getLogger(__name__)

IDLE_CHECK_DELAY_SECONDS = 0.2

TRIM_BYTES = 16 << 20
"""Bytes that must have been freed since the last trim while requests come and go."""
COLLECT_BYTES = 256 << 20
"""Bytes that requests give back between two collections of cycles, however busy the server is.
Python's own rule counts objects, not what hangs on them."""
PAUSE_SECONDS = 2.0
QUIET_SECONDS = 10.0
"""After this long without a request that ended, cycles are collected and the rest is returned."""


class IdleCheck:
    """Checks the engine after IDLE_CHECK_DELAY_SECONDS without an open request.

    Args:
        engine: the engine to check.
        requests: counter of open requests.
        on_failure: called when a check fails.

    Attributes:
        failed: a check has found a violated invariant.
    """

    def __init__(
        self, engine: Engine, requests: OpenRequests, on_failure: Callable[[], None]
    ) -> None:
        self.failed = False
        self._engine = engine
        self._requests = requests
        self._on_failure = on_failure
        self._task: asyncio.Task[None] | None = None
        self._idle_since = 0.0

    @property
    def running(self) -> bool:
        """True while a check runs or waits for the delay."""
        return self._task is not None

    def start(self) -> None:
        """Start the delay: the last open request has just ended."""
        self._idle_since = time.monotonic()
        if self._task is None and self._engine.alive:
            self._task = asyncio.ensure_future(self._run())

    def close(self) -> None:
        """Cancel the check."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        """Check the engine once it has been idle for the delay.

        A new request interrupts the check without waiting for it. The check begins again after
        the request.
        """
        checked = False
        try:
            while not checked:
                while (left := self._idle_since + IDLE_CHECK_DELAY_SECONDS - time.monotonic()) > 0:
                    await asyncio.sleep(left)
                if self._requests.num_open or not self._engine.alive:
                    return
                checked = await asyncio.to_thread(
                    self._engine.check, lambda: self._requests.num_open > 0
                )
        except EngineClosedError:
            return
        except AssertionError:
            self.failed = True
            self._on_failure()
            _log.exception("the idle engine violates an invariant of its cache")
        finally:
            self._task = None


class Trimmer:
    """Trims the heap on another thread.

    While requests end, it does so at most every PAUSE_SECONDS and if TRIM_BYTES were freed. It also
    collects cycles after COLLECT_BYTES, and when the server has become quiet.

    Attributes:
        num_trims: number of trims.
        num_collections: number of garbage collections.
    """

    def __init__(self) -> None:
        self.num_trims = 0
        self.num_collections = 0
        self._freed = 0
        self._uncollected = 0
        self._quiet_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def freed(self, size: int) -> None:
        """Count bytes that a request has given back; call it on the event loop."""
        self._freed += size
        self._uncollected += size
        self._quiet_at = asyncio.get_running_loop().time() + QUIET_SECONDS
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def close(self) -> None:
        """Stop trimming."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        """Trim until the server is quiet."""
        loop = asyncio.get_running_loop()
        try:
            while loop.time() < self._quiet_at:
                # A request that has just ended may still hold some of its memory.
                await asyncio.sleep(PAUSE_SECONDS)
                quiet = loop.time() >= self._quiet_at
                if quiet or self._uncollected >= COLLECT_BYTES:
                    self._uncollected = 0
                    await asyncio.to_thread(gc.collect)
                    self.num_collections += 1
                if quiet or self._freed >= TRIM_BYTES:
                    await self._trim()
        finally:
            self._task = None

    async def _trim(self) -> None:
        self._freed = 0
        await asyncio.to_thread(release_freed_memory)
        self.num_trims += 1
