"""Pauses generation: no step runs, what has begun waits, and so does what comes
(docs/rollouts.md#pause-and-go-on)."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Literal, get_args

from vlm_serve.engine.core.hooks import Loop
from vlm_serve.engine.core.scheduler import Scheduler
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup
from vlm_serve.errors import FieldError, InvalidRequestError

PauseMode = Literal["abort", "retract", "in_place", "wait"]
"""What becomes of requests in flight: they end; they give up their KV and compute it again later;
they keep it; they are answered first."""
Rest = Literal["paused", "asleep", "idle"]
"""Why an engine rests: by an order to pause or to sleep, or because nobody asks."""
MAX_WAITING = 2
"""Callers that may wait for the requests in flight at a time, since each of them takes a thread."""


def check_mode(mode: str) -> PauseMode:
    """Return the mode of this name. Raise InvalidRequestError for any other."""
    for known in get_args(PauseMode):
        if mode == known:
            return known  # type: ignore[no-any-return]
    raise FieldError("mode", f"must be one of {', '.join(get_args(PauseMode))}")


class Pause:
    """Stops the steps of an engine while there is a reason. Used by the engine's thread only.

    Args:
        scheduler: of the engine.

    Attributes:
        reasons: why no step is to run; empty: nothing is paused.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.reasons: frozenset[Rest] = frozenset()
        self._queues = scheduler.queues
        self._mode: PauseMode | None = None
        """What is still to be done with the requests in flight; None: it has been done."""
        self._first: set[str] = set()
        """Ids of the requests that are answered before the steps stop."""
        self._keeps = False
        self._told: list[Future[None]] = []

    def attach(self, loop: Loop) -> None:
        """Know the requests that have not ended."""
        self._loop = loop

    def begin(self, mode: PauseMode, why: Rest) -> Future[None]:
        """Stop the steps. A further pause does to the requests in flight what it says.

        Returns what completes when the requests in flight are as `mode` says. If generation goes on
        before that, it raises InvalidRequestError.

        Raises InvalidRequestError if as many callers as may wait for the requests in flight do.
        """
        if mode == "wait" and len(self._told) >= MAX_WAITING:
            problem = "others wait for the requests in flight already: abort these, or go on first"
            raise InvalidRequestError(problem)
        first = self._loop.groups if mode == "wait" and "asleep" not in self.reasons else ()
        self._first = {each.request.request_id for each in first if not each.request.cold}
        self.reasons |= {why}
        # Who sleeps gives the memory of KV back: a pause that comes meanwhile may not keep it.
        keeps = mode == "in_place" and "asleep" not in self.reasons
        self._mode, done = mode if keeps or mode != "in_place" else "retract", Future[None]()
        self._told.append(done)
        self._settle()
        return done

    def end(self, why: Rest) -> None:
        """Let the steps go on, if there is no other reason."""
        if self.reasons == {why}:
            self._loop.last_step_time = time.monotonic()  # the last step was long ago
        self.reasons -= {why}
        if self.reasons:
            return
        self._mode, self._keeps, self._first = None, False, set()
        told, self._told = self._told, []
        for done in told:
            problem = "generation was continued before the requests in flight had ended"
            done.set_exception(InvalidRequestError(problem))

    def may_step(self) -> bool:
        """Return False while paused."""
        return not self.reasons or bool(self._first)

    def may_extend(self, blocks: int, rows: int) -> str:
        """Return "paused" if the step under way is the last one."""
        return "" if self.may_step() else "paused"

    def may_start(self, sequence: Sequence) -> bool:
        """Return False for a request that has come since others are waited for. A suspect runs
        alone before all others, so they would wait for it."""
        awaited = not self._first or sequence.request.request_id in self._first
        return awaited or bool(sequence.suspect_until)

    def may_restart(self, sequence: Sequence) -> bool:
        """Return False while requests keep what they hold."""
        return not self._keeps

    def on_finished(self, group: SequenceGroup) -> None:
        """Stop the steps behind the last request that is waited for."""
        if group.request.request_id in self._first:
            self._first.discard(group.request.request_id)
            self._settle()

    def on_idle(self) -> None:
        """Stop behind the step that was under way."""
        self._settle()

    def _settle(self) -> None:
        """Do what is to be done, unless requests or a step are waited for."""
        if self._mode is None or self._first or self._queues.ahead:
            return
        mode, self._mode = self._mode, None
        self._keeps = mode == "in_place"
        for group in self._loop.groups if mode == "abort" else ():
            self._loop.abort(group.request.request_id)
        if not self._keeps:
            self._queues.reclaim()
            for sequence in (*self._queues.running, *self._queues.waiting):
                self._queues.retract(sequence)
        told, self._told = self._told, []
        for done in told:
            done.set_result(None)
