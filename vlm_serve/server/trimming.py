"""Memory that requests have held goes back to the system soon after they have ended.

glibc keeps what is freed between blocks that are not, for ever: a server would stay as large as its
largest moment. And what refers to itself, as a failed request's traceback does, is not freed before
Python looks for it, which a quiet server has no reason to do.
"""

from __future__ import annotations

import asyncio
import gc

from vlm_serve.kernels.host_memory import release_freed_memory

TRIM_BYTES = 16 << 20
"""What must have been freed since the last time while requests come and go."""
PAUSE_SECONDS = 2.0
QUIET_SECONDS = 10.0
"""After that long without a request that ended, the rest is looked for and given back too."""


class Trimmer:
    """Trims the heap once enough has been freed, at most every PAUSE_SECONDS, and all that is left
    when it has become quiet, on another thread.

    Attributes:
        num_trims: how often it has.
        num_collections: how often it has looked for what refers to itself.
    """

    def __init__(self) -> None:
        self.num_trims = 0
        self.num_collections = 0
        self._freed = 0
        self._quiet_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def freed(self, size: int) -> None:
        """Counts bytes that a request has given back. To be called on the event loop."""
        self._freed += size
        self._quiet_at = asyncio.get_running_loop().time() + QUIET_SECONDS
        if self._task is None:
            self._task = asyncio.ensure_future(self._tend())

    def close(self) -> None:
        """Leaves the rest as it is."""
        if self._task is not None:
            self._task.cancel()

    async def _tend(self) -> None:
        """Until it is quiet."""
        loop = asyncio.get_running_loop()
        try:
            while loop.time() < self._quiet_at:
                # What has just ended may not have let go of it all.
                await asyncio.sleep(PAUSE_SECONDS)
                if loop.time() >= self._quiet_at:
                    await asyncio.to_thread(gc.collect)
                    self.num_collections += 1
                    await self._trim()
                elif self._freed >= TRIM_BYTES:
                    await self._trim()
        finally:
            self._task = None

    async def _trim(self) -> None:
        self._freed = 0
        await asyncio.to_thread(release_freed_memory)
        self.num_trims += 1
