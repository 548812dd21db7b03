"""What a server process answers with, and the requests that it has open."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

from vlm_serve.server.config import ServerConfig


class Work(ABC):
    """Everything here runs on the event loop.

    Attributes:
        config: the server's options.
        draining: no new work is taken.
        num_open: requests that have been let in and have not ended.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.draining = False
        self.num_open = 0
        self._all_done = asyncio.Event()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts one request in and out."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._all_done.set()

    async def drain(self, timeout: float) -> bool:
        """Takes no more work and waits for what runs. True if all of it ended in time."""
        self.draining = True
        deadline = time.monotonic() + timeout
        while self.num_open and (left := deadline - time.monotonic()) > 0:
            self._all_done.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_done.wait(), left)
        return not self.num_open

    @abstractmethod
    def end_streams(self) -> None:
        """Ends the streams that would go on for ever."""

    @abstractmethod
    async def close(self) -> None:
        """Ends all there is."""
