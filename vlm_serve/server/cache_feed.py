"""The feed of the cache's changes: one poll of the mirror for all subscribers.

With subscribers, the mirror is polled ten times a second, and the engine's thread is asked only for
its counters, once a second. Without any, the counters are read every few seconds, as long as the
engine works, so that a new subscriber can be shown the last minutes.

A status message holds the totals of a server: memory, usage, queue, tokens, latencies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vlm_serve.engine.features.mirror import SECONDS, TreeMirror
from vlm_serve.engine.steps.memory import EMBEDDING_CACHE_BYTES, LOGPROB_CACHE_BYTES
from vlm_serve.errors import EngineClosedError, OverloadedError
from vlm_serve.server.http.admission import OpenRequests
from vlm_serve.server.http.errors import DrainingError
from vlm_serve.server.state import ServerState
from vlm_serve.server.traffic_log import TrafficLog

if TYPE_CHECKING:
    from vlm_serve.engine.engine import Engine
    from vlm_serve.engine.steps.memory import MemoryPlan

_log = logging.getLogger(__name__)

MAX_SUBSCRIBERS = 8
"""Subscribers of one API key, so that nobody keeps others from reading."""
POLL_SECONDS = 0.1
"""Interval between polls of the mirror."""
POLLS_PER_USE = 5
"""Polls between reports of pins and hits, which a request changes on its whole path."""
POLLS_PER_STATUS = 10
HISTORY_SECONDS = 5.0
"""Interval between the statuses that are kept."""
MAX_HISTORY = 60
"""Maximum number of kept statuses, each of about 4 KiB: five minutes of work."""


class CacheFeed:
    """The subscribers of one server's cache. It is used on the event loop only.

    Args:
        engine: the engine whose cache is watched.
        state, requests: the server's, for its status.

    Attributes:
        status: the latest status; empty before the first one.
        status_number: number of statuses so far.
    """

    def __init__(self, engine: Engine, state: ServerState, requests: OpenRequests) -> None:
        self.status: dict[str, Any] = {}
        self.status_number = 0
        self._history: deque[tuple[float, dict[str, Any]]] = deque(maxlen=MAX_HISTORY)
        self._traffic = TrafficLog()
        self._keeping: asyncio.Task[None] | None = None
        self._subscribers: Counter[bytes] = Counter()
        self._engine = engine
        self._state, self._requests = state, requests
        self._polling: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._polled = asyncio.Event()
        self._closed = False

    @property
    def num_subscribers(self) -> int:
        """Number of subscribers."""
        return self._subscribers.total()

    @property
    def mirror(self) -> TreeMirror:
        """The engine's mirror of the cache's tree."""
        return self._engine.mirror

    def start(self) -> None:
        """Begin to keep a history, on the running loop."""
        self._keeping = asyncio.ensure_future(self._keep_history())

    def close(self) -> None:
        """End every subscription, and the history."""
        self._closed = True
        self._polled.set()
        if self._keeping is not None:
            self._keeping.cancel()

    def history(self) -> list[tuple[float, dict[str, Any]]]:
        """Return the statuses of the last minutes with their ages in seconds, oldest first."""
        now = time.monotonic()
        return [(now - at, status) for at, status in self._history if now - at <= SECONDS]

    @contextlib.contextmanager
    def subscribed(self, share: bytes = b"") -> Iterator[None]:
        """Count a subscriber for the duration of the block.

        Args:
            share: whose subscribers it counts among, see `auth.share_of`.

        Raises:
            OverloadedError: there are too many subscribers.
            DrainingError, EngineClosedError: there will be no more changes.
        """
        if self._closed:
            raise DrainingError("the server is shutting down", code="shutting_down")
        if not self._engine.alive:
            raise EngineClosedError("the engine has stopped", code="engine_stopped")
        if self._subscribers[share] >= MAX_SUBSCRIBERS:
            raise OverloadedError(
                f"{MAX_SUBSCRIBERS} clients of this key read the cache's events already",
                code="too_many_subscribers",
            )
        self._subscribers[share] += 1
        try:
            with self.mirror.following():
                if self._polling is None:
                    self._polling = asyncio.ensure_future(self._poll())
                yield
        finally:
            self._subscribers -= Counter({share: 1})
            if not self.num_subscribers and self._polling is not None:
                self._polling.cancel()
                self._polling = None

    async def next_poll(self) -> bool:
        """Wait for the next poll of the mirror; return False if it was the last one."""
        await self._polled.wait()
        return not self._closed and self._engine.alive

    async def _poll(self) -> None:
        number = 0
        while not self._closed:
            if number % POLLS_PER_USE == 0:
                self.mirror.publish_use()
            if number % POLLS_PER_STATUS == 0 and (self._reading is None or self._reading.done()):
                self._reading = asyncio.ensure_future(self._read_status())
            polled, self._polled = self._polled, asyncio.Event()
            polled.set()
            await asyncio.sleep(POLL_SECONDS)
            number += 1

    async def _keep_history(self) -> None:
        """Keep a status every few seconds, unless the engine has done nothing since the last one.

        The status before a time without work is kept again at its end, for there is no other way to
        tell how long that was.
        """
        seen = None
        while not self._closed:
            step = self._engine.last_step_time
            if step != seen:
                if self._history and time.monotonic() - self._history[-1][0] > 2 * HISTORY_SECONDS:
                    self._history.append((time.monotonic() - HISTORY_SECONDS, self._history[-1][1]))
                if not self.num_subscribers:
                    await self._read_status()
                if self.status:
                    self._history.append((time.monotonic(), self.status))
                seen = step
            if self.status:
                self._traffic.note(self.status)
            await asyncio.sleep(HISTORY_SECONDS)

    async def _read_status(self) -> None:
        """Read the engine's counters; an engine in a long step answers after it."""
        try:
            stats = await asyncio.to_thread(self._engine.stats)
            open_requests = self._requests.num_open
            self.status = cache_status(self._engine.memory, self._state, open_requests, stats)
            self.status_number += 1
        except EngineClosedError:
            return
        except Exception:
            _log.exception("the status of the cache could not be read")


def cache_status(
    plan: MemoryPlan, state: ServerState, open_requests: int, stats: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the data of an event `status`.

    Args:
        plan: the engine's memory plan.
        state: the server's state.
        open_requests: number of open requests.
        stats: fresh result of `Engine.stats`.
    """
    cache = stats["cache"]
    return {
        "time": time.time(),
        "memory": memory_used(plan, stats),
        "memory_limits": memory_limits(plan),
        "usage": stats["usage"],
        "tiers": stats["tiers"],
        "running": stats["num_running"],
        "waiting": stats["num_waiting"],
        "joined": stats["num_joined"],
        "open_requests": open_requests,
        "requests": cache["requests"],
        "prompt_tokens": cache["query_tokens"],
        "hit_tokens": cache["hit_tokens"],
        "joined_requests": cache["joined_requests"],
        "joined_tokens": cache["joined_tokens"],
        "generated_tokens": state.num_generated_tokens,
        "reasons": cache["reasons"],
        "evictions": cache["evictions"],
        "steps": stats["num_steps"],
        "preemptions": stats["num_preemptions"],
        "time_to_first_token_seconds": state.first_token_seconds.percentiles(),
        "inter_token_seconds": state.inter_token_seconds.percentiles(),
    }


def memory_used(plan: MemoryPlan, stats: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes in use by bucket."""
    usage = stats["usage"]
    rows = usage["rows"]
    return {
        "kv": (usage["blocks"] - usage["free_blocks"]) * plan.block_bytes,
        "snapshots": (rows["ready"] + rows["reserved"] + rows["private"]) * plan.snapshot_bytes,
        "live_states": rows["live"] * plan.snapshot_bytes,
        "embeddings": stats["embedding_bytes"],
        "experts": usage["expert_bytes"],
        "logprobs": usage["logprob_bytes"],
    }


def memory_limits(plan: MemoryPlan) -> dict[str, int | None]:
    """Return the most bytes of each bucket; None: it depends on the other buckets."""
    return {
        "kv": plan.num_blocks * plan.block_bytes,
        "snapshots": plan.num_snapshot_rows * plan.snapshot_bytes,
        "live_states": plan.live_state_bytes,
        "embeddings": EMBEDDING_CACHE_BYTES,
        "experts": None,
        "logprobs": LOGPROB_CACHE_BYTES,
    }
