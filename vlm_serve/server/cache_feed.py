"""What the cache does, told to whoever watches: one reader of the mirror for all subscribers.

While nobody subscribes nothing runs here. While somebody does, the mirror is looked at some times
a second; the engine's thread is asked for nothing but its counters, once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vlm_serve.engine.mirror import TreeMirror
from vlm_serve.errors import EngineClosedError, OverloadedError
from vlm_serve.server.http.errors import DrainingError

if TYPE_CHECKING:
    from vlm_serve.engine.engine import Engine

_log = logging.getLogger(__name__)

MAX_SUBSCRIBERS = 8
LOOK_SECONDS = 0.1
"""Between two looks at the mirror."""
USE_LOOKS = 5
"""So many looks apart, pins and hits are told: a request changes them on its whole path."""
STATUS_LOOKS = 10


class CacheFeed:
    """The subscribers of one server. All on the event loop.

    Args:
        engine: whose cache is watched.
        status_of: makes a status message's body from what `Engine.stats` returns.

    Attributes:
        status: the latest one, empty before the first one.
        status_number: how many there have been.
        num_subscribers: how many there are.
    """

    def __init__(
        self, engine: Engine, status_of: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        self.status: dict[str, Any] = {}
        self.status_number = 0
        self.num_subscribers = 0
        self._engine = engine
        self._status_of = status_of
        self._looking: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()
        self._closed = False

    @property
    def mirror(self) -> TreeMirror:
        return self._engine.mirror

    def close(self) -> None:
        """Ends every subscription."""
        self._closed = True
        self._looked.set()

    @contextlib.contextmanager
    def subscribed(self) -> Iterator[None]:
        """Counts a subscriber in and out.

        Raises OverloadedError if there are too many, DrainingError or EngineClosedError if there
        will be nothing to tell.
        """
        if self._closed:
            raise DrainingError("the server is shutting down", code="shutting_down")
        if not self._engine.alive:
            raise EngineClosedError("the engine has stopped", code="engine_stopped")
        if self.num_subscribers >= MAX_SUBSCRIBERS:
            raise OverloadedError(
                f"{MAX_SUBSCRIBERS} clients read the cache's events already",
                code="too_many_subscribers",
            )
        self.num_subscribers += 1
        try:
            with self.mirror.following():
                if self._looking is None:
                    self._looking = asyncio.ensure_future(self._look())
                yield
        finally:
            self.num_subscribers -= 1
            if not self.num_subscribers and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    async def looked(self) -> bool:
        """Waits for the next look at the mirror; False if it was the last one."""
        await self._looked.wait()
        return not self._closed and self._engine.alive

    async def _look(self) -> None:
        number = 0
        while not self._closed:
            if number % USE_LOOKS == 0:
                self.mirror.publish_use()
            if number % STATUS_LOOKS == 0 and (self._asking is None or self._asking.done()):
                self._asking = asyncio.ensure_future(self._ask())
            looked, self._looked = self._looked, asyncio.Event()
            looked.set()
            await asyncio.sleep(LOOK_SECONDS)
            number += 1

    async def _ask(self) -> None:
        """An engine in a long step answers when it has ended; until then nobody waits."""
        try:
            stats = await asyncio.to_thread(self._engine.stats)
            self.status = self._status_of(stats)
            self.status_number += 1
        except EngineClosedError:
            return
        except Exception:
            _log.exception("the status of the cache could not be told")
