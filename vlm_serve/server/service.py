"""The service behind all routes: an engine, admission, workers and state."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.media.loading import LoadedMedia
from vlm_serve.preprocess.text.rendering import Rendering
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.cache_feed import CacheFeed
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.grammar_queue import GrammarQueue
from vlm_serve.server.http.admission import AdmissionControl, OpenRequests
from vlm_serve.server.http.request_memory import FetchedMemory
from vlm_serve.server.routes import MountedRoutes
from vlm_serve.server.state import ServerState
from vlm_serve.server.unread import UnreadDeltas
from vlm_serve.server.upkeep import IdleCheck, Trimmer
from vlm_serve.server.workers import Workers
from vlm_serve.system.stopping import Stop

if TYPE_CHECKING:
    from vlm_serve.engine.engine import Engine


Preparation = Prompt | Rendering | Callable[[Stop], Prompt]
"""A prompt, a rendering whose media are still to be loaded, or work that loads media itself until
it is stopped."""

Mount = Callable[["Service"], MountedRoutes]
"""Makes routes of a folder above the server."""


class Service:
    """One server without its routes. It is used on the event loop only.

    Args:
        engine: the engine that answers; it is closed with the service.
        config: the server's options.
        model_names: names under which requests may ask for the model; the first is canonical.
        mounts: make further routes of this service.

    Attributes:
        admission: limits on open requests.
        workers: thread pools for blocking work.
        state: model names, statistics and stored answers.
        max_body_bytes: limit of a request's body.
        grammars: queue of the grammar compiler.
        idle_check: check of the cache's invariants.
        cache_feed: feed of the cache's changes.
        trimmer: returns freed memory to the system.
        mounted: the routes of `mounts`.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        model_names: tuple[str, ...],
        mounts: Sequence[Mount] = (),
    ) -> None:
        self.engine = engine
        self.config = config
        self.max_body_bytes = config.max_body_bytes
        self.trimmer = Trimmer()
        self.admission = AdmissionControl(engine, config, self.trimmer.freed)
        self.workers = Workers(config.preprocess_threads)
        self.state = ServerState(engine, config, model_names, self.admission.memory)
        self.grammars = GrammarQueue(engine, self.workers.grammar)
        failures = self.state.metrics.check_failures
        self.idle_check = IdleCheck(engine, self.requests, failures.inc)
        if config.idle_check:
            self.admission.on_idle = self.idle_check.start
        self.cache_feed = CacheFeed(engine, self.state, self.requests)
        self._mailbox: Mailbox | None = None
        self.mounted = tuple(mount(self) for mount in mounts)
        self.requests.on_drain = self._stop_mounted
        self.requests.may_end = lambda: not engine.rests - {"idle"}

    @property
    def requests(self) -> OpenRequests:
        """The counter of open requests."""
        return self.admission.requests

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        tokenizer: Tokenizer = self.engine.preprocessor.tokenizer
        return tokenizer

    @property
    def mailbox(self) -> Mailbox:
        """The way of deltas from the engine's thread to the running event loop."""
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop())
        return self._mailbox

    async def prepare(self, work: Callable[[], Preparation], stop: Stop | None = None) -> Prompt:
        """Make a prompt on a preparation thread.

        No preparation thread is held while media are fetched and decoded. Cancelling ends all
        of it.

        Args:
            work: see `Preparation`.
            stop: stopped at the end; it also measures the stages.

        Raises:
            VlmServeError: see `Preprocessor.prepare`.
        """
        stop = stop or Stop()
        preprocessor = self.engine.preprocessor

        def begin() -> tuple[Preparation, list[Future[LoadedMedia]]]:
            """Render, and start loading media; starting threads may block."""
            preparation = work()
            if isinstance(preparation, Rendering):
                return preparation, preprocessor.start_loading(preparation, stop)
            return preparation, []

        try:
            with stop.timed("render"):
                rendering, loading = await self.workers.prepare(begin)
            if isinstance(rendering, Prompt):
                return rendering
            with stop.timed("media"):
                if not isinstance(rendering, Rendering):
                    return await self.workers.wait(partial(rendering, stop))
                media = await asyncio.gather(*map(asyncio.wrap_future, loading))
        finally:
            stop.set()
        with stop.timed("finish"):
            return await self.workers.prepare(partial(preprocessor.finish, rendering, media))

    async def flush(self) -> None:
        """Evict everything that no running request holds, what is kept of answers, held media."""
        await asyncio.to_thread(self.engine.flush)
        self.state.prompts.clear()
        if self.state.responses is not None:
            self.state.responses.clear()
        if self.state.media is not None:
            self.state.media.clear()

    def _stop_mounted(self) -> None:
        for routes in self.mounted:
            routes.stop()

    def end_streams(self) -> None:
        """End the endless streams."""
        self.cache_feed.close()

    def start(self) -> None:
        """Begin the background work, on the running loop."""
        self.cache_feed.start()
        # Fetched media count against the budget of open requests.
        seconds = self.engine.config.media_fetch_timeout
        loop = asyncio.get_running_loop()
        fetched = FetchedMemory(self.admission.memory, loop, seconds)
        self.engine.preprocessor.count_fetched(fetched.holding)

    async def close(self) -> None:
        """End the background work and close the engine."""
        self.requests.draining = True
        self.trimmer.close()
        self.cache_feed.close()
        self.engine.preprocessor.count_fetched(None)
        self.idle_check.close()
        for routes in self.mounted:
            await routes.close()
        self.workers.shutdown()
        await asyncio.to_thread(self.engine.close)
        if self.state.tracer is not None:
            await asyncio.to_thread(self.state.tracer.close)


PATIENT_SECONDS = 0.25
"""Least time between wake-ups for patient readers, which keep the loop's counters fresh."""


class Mailbox:
    """Carries deltas from the engine's thread into queues of the loop. `post` and `hand_over` are
    thread-safe and never block.

    A step ends with one delta for each running sequence. Waking the loop costs a system call, in
    which the engine's thread may lose the interpreter to the loop before its last delta is made. So
    the loop is woken once a step, not while a wake-up is pending, and not for patient readers.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[tuple[UnreadDeltas, Delta]] = deque()
        self._urgent = False
        self._waking = False
        self._delivered = 0.0

    def post(self, queue: UnreadDeltas, delta: Delta, *, patient: bool = False) -> None:
        """Put a delta into a queue of the loop, in the order of posting, with the next `hand_over`.

        Args:
            patient: the queue's reader only needs the last delta of each choice in time.
        """
        self._posted.append((queue, delta))
        overdue = delta.time >= self._delivered + PATIENT_SECONDS
        if not patient or delta.finish_reason is not None or overdue:
            self._urgent = True

    def hand_over(self) -> None:
        """Wake the loop for what has been posted, at the end of a step."""
        if self._urgent and not self._waking:
            self._urgent, self._waking = False, True
            # A closed loop has no readers either.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Reset first, so that a delta posted from here on causes another wake-up.
        self._waking, self._delivered = False, time.monotonic()
        queues: dict[UnreadDeltas, None] = {}
        while self._posted:
            queue, delta = self._posted.popleft()
            queue.add(delta)
            queues[queue] = None
        for queue in queues:
            queue.settle()
