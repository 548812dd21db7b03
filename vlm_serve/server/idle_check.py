"""Checking the cache's invariants while a server is idle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vlm_serve.errors import EngineClosedError
from vlm_serve.server.http.open_requests import OpenRequests

if TYPE_CHECKING:
    from vlm_serve.engine.engine import Engine

_log = logging.getLogger(__name__)

IDLE_CHECK_DELAY_SECONDS = 0.2


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
