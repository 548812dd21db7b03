"""Memory that requests have held goes back to the system soon after they have ended.

glibc keeps what is freed between blocks that are not, for ever: a server would stay as large as its
largest moment.
"""

from __future__ import annotations

import asyncio
import ctypes

TRIM_BYTES = 16 << 20
"""What must have been freed since the last time."""
PAUSE_SECONDS = 2.0

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it


class Trimmer:
    """Trims the heap once enough has been freed, at most every PAUSE_SECONDS, on another thread.

    Attributes:
        num_trims: how often it has.
    """

    def __init__(self) -> None:
        self.num_trims = 0
        self._freed = 0
        self._task: asyncio.Task[None] | None = None

    def freed(self, size: int) -> None:
        """Counts bytes that a request has given back. To be called on the event loop."""
        self._freed += size
        if _malloc_trim is None or self._freed < TRIM_BYTES or self._task is not None:
            return
        self._freed = 0
        self._task = asyncio.ensure_future(self._trim())

    async def _trim(self) -> None:
        try:
            await asyncio.sleep(PAUSE_SECONDS)  # what has just ended may not have let go of it all
            assert _malloc_trim is not None
            await asyncio.to_thread(_malloc_trim, 0)
            self.num_trims += 1
        finally:
            self._task = None
