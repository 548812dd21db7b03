"""Gives memory back while an engine has nothing to do: the cache's, and by order the weights' too
(docs/rollouts.md#sleep-and-wake)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Literal, get_args

from vlm_serve.engine.core.executor import Executor
from vlm_serve.engine.core.hooks import Loop
from vlm_serve.engine.core.scheduler import Scheduler
from vlm_serve.engine.features.pause import Pause
from vlm_serve.engine.features.tiers.loading import TierLoading
from vlm_serve.engine.features.weights import WeightUpdates
from vlm_serve.engine.requests.plan import StepPlan
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.errors import FieldError

Part = Literal["weights", "kv_cache"]
"""What is given back: the model's weights; KV, states and embeddings."""
PARTS: tuple[Part, ...] = get_args(Part)
_AWAKE_SECONDS = 3600.0
"""Longest time between two looks at the clock."""


def check_parts(parts: Collection[str], field: str = "tags") -> frozenset[Part]:
    """Return the parts of these names. Raise InvalidRequestError if there are none or others."""
    known = {part for part in PARTS if part in parts}
    if not known or set(parts) - known:
        raise FieldError(field, f"must be some of {', '.join(PARTS)}")
    return frozenset(known)


class Sleep:
    """Gives memory back and takes it again. Used by the engine's thread only.

    Args:
        scheduler: of the engine.
        tiers: takes what leaves the device.
        executor: computes nothing meanwhile.
        release: gives the pages of the pools back.
        seconds: without a request after which the cache's memory is given back; None: never.
        pause: stops steps; None: no order to sleep is taken.
        weights: reads them again; None likewise.

    Attributes:
        parts: what was given back by order, and has not been taken again.
        idle: the cache's memory was given back without an order, until the next request.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tiers: TierLoading,
        executor: Executor,
        release: Callable[[], None],
        *,
        seconds: float | None,
        pause: Pause | None,
        weights: WeightUpdates | None,
    ) -> None:
        self.parts: frozenset[Part] = frozenset()
        self.idle = False
        self._queues, self._tiers, self._executor = scheduler.queues, tiers, executor
        self._release, self._seconds = release, seconds
        self._pause, self._weights = pause, weights
        self._due: float | None = None

    def attach(self, loop: Loop) -> None:
        """Know the requests that have not ended, and begin to count the time without any."""
        self._loop = loop
        self._wait()

    def on_added(self, group: SequenceGroup) -> None:
        """Wake up: pages come back as steps write them."""
        self._due, self.idle = None, False

    def on_finished(self, group: SequenceGroup) -> None:
        """Begin to count the time behind the last request."""
        if self._seconds is not None and not self._loop.groups:
            self._wait()

    def on_renewed(self) -> None:
        """Take the weights of an update in the place of those that were given back."""
        self.take(frozenset({"weights"}))

    def on_time(self) -> None:
        """Give the cache's memory back if nobody has asked for so long."""
        if self._due is None or time.monotonic() < self._due:
            return
        if self.parts or self._queues.cache.timed_pins.next_end is not None:
            self._wait()  # who pins a prefix wants it kept
            return
        self._due, self.idle = None, True
        self._give_cache()

    def seconds_left(self) -> float:
        """Return the seconds until the clock has to be looked at."""
        left = _AWAKE_SECONDS if self._due is None else self._due - time.monotonic()
        return max(0.0, min(left, _AWAKE_SECONDS))

    def give(self, parts: frozenset[Part]) -> None:
        """Give memory back, while generation is paused and no request holds anything."""
        if "kv_cache" in parts:
            self._give_cache()
        if "weights" in parts and "weights" not in self.parts:
            assert self._weights is not None
            self._weights.drop()
        self.parts |= parts

    def take(self, parts: frozenset[Part]) -> None:
        """Note that memory is there again; with all of it, generation goes on."""
        self.parts -= parts
        if self.idle and "kv_cache" in parts:
            self.idle = False
            self._wait()
        if not self.parts and self._pause is not None:
            self._pause.end("asleep")

    def check(self, parts: frozenset[Part]) -> None:
        """Raise InvalidRequestError if weights could not be read again."""
        if self._weights is not None and "weights" in parts - self.parts:
            self._weights.check_kept()

    def _wait(self) -> None:
        if self._seconds is not None:
            self._due = time.monotonic() + self._seconds

    def _give_cache(self) -> None:
        media = self._queues.media
        self._queues.reclaim()
        self._tiers.sink()
        media.cache.flush(saved=True)
        self._executor.run(StepPlan((), dropped_slots=media.take_dropped()))
        self._release()
