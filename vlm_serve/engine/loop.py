"""Thread of the engine: runs posted commands and, between them, plan -> run -> commit."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from vlm_serve.engine.affinity_map import AffinityMap
from vlm_serve.engine.auditing import Auditor
from vlm_serve.engine.executor import ExecutorLostError, StepError
from vlm_serve.engine.inspection import Inspector
from vlm_serve.engine.media import MediaLoading
from vlm_serve.engine.mirror import TreeMirror
from vlm_serve.engine.next_turns import NextTurns
from vlm_serve.engine.parts import EngineParts
from vlm_serve.engine.plan import StepPlan
from vlm_serve.engine.request import Request
from vlm_serve.engine.scheduler import Event
from vlm_serve.engine.sequence import Sequence, SequenceGroup
from vlm_serve.engine.tier_loading import TierLoading
from vlm_serve.engine.validation import check_request
from vlm_serve.errors import EngineClosedError, MediaError, VlmServeError
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.system.host_threads import release_worker_threads

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
"""Upper bounds of the buckets, in seconds; a last bucket holds longer times."""


class EngineLoop:
    """Runs steps while there is work; waits for commands otherwise.

    `post`, `call`, `alive` and `close` are thread-safe; everything else belongs to the loop's own
    thread.

    Args:
        parts: components of the engine.
        auditor: chooses requests to run again without the cache.
        inspector: expires pins between steps.
        mirror: shows the cache's tree to other threads.
        affinity: records the cached prefixes of requests for routers.
        make_group: prepares a request of the auditor for the scheduler.

    Attributes:
        num_steps, last_step_time: number of steps, and end of the last one (monotonic seconds).
        step_times: time of steps outside of the model.
        tiers: lower cache tiers.
    """

    def __init__(
        self,
        parts: EngineParts,
        auditor: Auditor,
        inspector: Inspector,
        mirror: TreeMirror,
        affinity: AffinityMap,
        *,
        group: Callable[[Request], SequenceGroup],
    ) -> None:
        self.num_steps = 0
        self.last_step_time = time.monotonic()
        self.step_times = StepTimes()
        self.tiers = TierLoading(parts.cache, parts.tiers, self.post, parts.media.tiers)
        self._max_num_seqs = parts.config.max_num_seqs
        self._scheduler = parts.scheduler
        self._next_turns = NextTurns(self.post)
        self._scheduler.endings.ask = self._next_turns.ask
        self._executor = parts.executor
        self._auditor = auditor
        self._inspector = inspector
        self._mirror = mirror
        self._affinity = affinity
        self._make_group = group
        self._preprocessor = parts.preprocessor
        self._media_loader = MediaLoading(parts.media, self.post, self._fail_request, self._restart)
        self._adapters = parts.scheduler.adapters
        if self._adapters is not None:
            self._adapters.wake = self._wake
        self._spec, self._max_length = parts.spec, parts.language.max_length
        self._ending: ExecutorLostError | None = None
        self._groups: dict[str, SequenceGroup] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._stopping = False
        self._lock = threading.Lock()
        self._step_began = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="vlm-serve-engine", daemon=True)

    # -- called from any thread --------------------------------------------------------------------

    def start(self) -> None:
        release_worker_threads()
        self._thread.start()
        self._executor.watch(self._on_executor_lost)

    def post(self, command: Callable[[], None]) -> None:
        """Run a command between two steps. Raise EngineClosedError if the loop has ended."""
        with self._lock:
            if self._closed or not self._thread.is_alive():
                raise EngineClosedError("the engine is closed")
            self._inbox.put(command)

    def call(self, function: Callable[[], _T]) -> _T:
        """Run a function between two steps and return its result. Raise as `post` does."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[_T] = Future()

        def run() -> None:
            try:
                result = function()
                self._mirror.publish()
                future.set_result(result)
            except BaseException as error:
                future.set_exception(error)

        self.post(run)
        return future.result()

    @property
    def alive(self) -> bool:
        return not self._closed and self._thread.is_alive()

    def close(self) -> None:
        """End the thread after the step in progress. Repeated calls are allowed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._inbox.put(None)

    def join(self) -> None:
        """Wait until the thread has ended; return at once on this thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        """Plan again: an adapter is ready."""
        with contextlib.suppress(EngineClosedError):
            self.post(lambda: None)

    def _on_executor_lost(self, error: ExecutorLostError) -> None:
        """End the loop: a part of the executor is gone, perhaps while no step was running."""

        def end() -> None:
            raise error

        with contextlib.suppress(EngineClosedError):
            self.post(end)

    # -- commands ----------------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        """Queue a request."""
        self._groups[group.request.request_id] = group
        for sequence in group.sequences:
            self._executor.register(sequence.info)
        self._scheduler.add(group)

    def abort(self, request_id: str) -> None:
        """End a request. Ignore unknown ids."""
        group = self._groups.get(request_id)
        if group is not None:
            self._emit(self._scheduler.end(group))

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._handle_commands():
                if self._scheduler.has_work and self._step():
                    now = time.perf_counter()
                    self.step_times.record(now - self._step_began, self._executor.model_seconds)
                    self._step_began = now
                self._forget_closed()
                self._manage_audits()
                self._mirror.publish()
        except ExecutorLostError as error:
            _log.critical("the engine ends: %s", error)
            self._ending, self._closed = error, True
        except BaseException:
            _log.exception("the engine's thread died")
            self._closed = True
        finally:
            self._end_all()

    def _handle_commands(self) -> bool:
        """Run posted commands; wait for one if there is no other work. Return False to end the
        loop."""
        while not self._stopping:
            wait = not self._scheduler.has_work
            if not wait and self._inbox.empty():
                return True
            try:
                self._run_next_command(wait=wait)
            except queue.Empty:
                return True
        return False

    def _run_next_command(self, wait: bool) -> None:
        """Run the next command. Raise queue.Empty if there is none, or if a pin expired first."""
        if wait:
            release_worker_threads()
        try:
            command = self._inbox.get(block=wait, timeout=self._inspector.seconds_left)
        except queue.Empty:
            if wait:
                self._inspector.expire()
            raise
        if wait:
            self._step_began = time.perf_counter()
        self._inspector.expire()
        if command is None:
            self._stopping = True
        else:
            command()
            self._forget_closed()
        self._mirror.publish()

    def _step(self) -> bool:
        """Run one step. Return False if none could be planned and the loop only waited."""
        self._inspector.expire()
        plan = self._scheduler.plan()
        failures = self._scheduler.take_failures()
        self._emit(failures)
        self._media_loader.start()
        self.tiers.start()
        if plan is None:
            if failures or not self._scheduler.has_work:
                return False
            with contextlib.suppress(queue.Empty):
                if self.tiers.busy or (self._adapters is not None and self._adapters.busy):
                    self._run_next_command(wait=True)
                elif not self._scheduler.running and self._scheduler.waiting:
                    self._emit(self._scheduler.reject_head())
                elif self._media_loader.busy:
                    self._run_next_command(wait=True)
            return False
        events = self._run_plan(plan)
        # Publish before the deltas: a client may inspect the cache once it has an answer.
        self._mirror.publish()
        self._emit(events)
        self.num_steps += 1
        self.last_step_time = time.monotonic()
        return True

    def _run_plan(self, plan: StepPlan) -> list[Event]:
        began = time.perf_counter()
        try:
            output = self._executor.run(plan)
        except ExecutorLostError:
            raise
        except Exception as error:
            failure = error if isinstance(error, StepError) else StepError(error, "unknown")
            if not isinstance(failure.cause, VlmServeError):
                _log.exception("a step failed; its sequences are retried one by one")
            return self._scheduler.fail(plan, failure)
        self._scheduler.learn(plan, output, time.perf_counter() - began)
        return self._scheduler.commit(plan, output)

    def _emit(self, events: list[Event]) -> None:
        for group, delta in events:
            request = group.request
            if request.affinity and delta.usage.completion_tokens == 1:
                self._note_affinity(group)
            if delta.finish_reason is not None:
                self._forget(group.sequences[delta.index])
            if group.finished:
                self._media_loader.forget(group)
            if group.finished and self._groups.pop(request.request_id, None) is not None:
                self._auditor.consider(group)
            try:
                request.on_delta(delta)
            except Exception:
                _log.exception("a callback of request %s raised", request.request_id)

    def _forget(self, sequence: Sequence) -> None:
        """Tell the executor that a sequence has ended, unless its state is being kept."""
        if not self._scheduler.endings.keeps(sequence.number):
            self._executor.forget(sequence.number)

    def _forget_closed(self) -> None:
        """Tell the executor which endings are over."""
        for number in self._scheduler.endings.take_closed():
            self._executor.forget(number)

    def _note_affinity(self, group: SequenceGroup) -> None:
        """Record a request whose prompt has been computed."""
        if group.report is not None:
            request = group.request
            self._affinity.note(request.affinity, request.prompt, group.report.snapshots)

    def _manage_audits(self) -> None:
        """Start an audit while there is capacity; abort it if a request of a caller waits."""
        scheduler, auditor = self._scheduler, self._auditor
        full = len(scheduler.running) >= self._max_num_seqs
        waiting = scheduler.has_idle_callers
        running = auditor.running
        if running is not None and full and waiting:
            self.abort(running.request_id)
        elif running is None and not full and not waiting:
            request = auditor.start()
            if request is not None:
                self.add(self._make_group(request))

    def _fail_request(self, group: SequenceGroup, error: VlmServeError) -> None:
        self._emit(self._scheduler.end(group, error))

    def _restart(self, group: SequenceGroup, prompt: Prompt) -> None:
        """Restart a request whose medium differs from its record, with the corrected prompt. If the
        answer has begun, end the request with an error instead."""
        request = replace(group.request, prompt=prompt)
        try:
            if any(sequence.num_generated for sequence in group.sequences):
                raise MediaError("a medium differs from its record, and the answer has begun")
            check_request(prompt, request.params, self._spec, self._max_length)
        except VlmServeError as error:
            self._fail_request(group, error)
            return
        self._scheduler.end(group)
        for sequence in group.sequences:
            self._forget(sequence)
        self._media_loader.forget(group)
        self.add(self._make_group(request))

    def _end_all(self) -> None:
        """End all requests with an error and close everything, so that no client waits for ever."""
        with self._lock:
            self._closed = True
        self._media_loader.close()
        self._next_turns.close()
        self._preprocessor.close()
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._inbox.get_nowait()
                if command is not None:
                    with contextlib.suppress(ExecutorLostError):
                        command()
        why = str(self._ending or "the engine was closed while the request was running")
        error = EngineClosedError(why, code="engine_stopped")
        for group in list(self._groups.values()):
            with contextlib.suppress(Exception):
                self._emit(self._scheduler.end(group, error))
        self.tiers.close()
        if self._adapters is not None:
            self._adapters.close()
        self._executor.close()


class StepTimes:
    """Histogram of each step's host time: planning, sampling, bookkeeping, callbacks and posted
    commands, without the model's own work.

    Attributes:
        counts: steps per bucket, `len(BOUNDS) + 1` of them.
        host_seconds, model_seconds: sums over all steps.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.host_seconds = 0.0
        self.model_seconds = 0.0

    def record(self, seconds: float, model_seconds: float) -> None:
        """Add a step with a total duration of `seconds`."""
        host = seconds - model_seconds
        self.counts[bisect_left(BOUNDS, host)] += 1
        self.host_seconds += host
        self.model_seconds += model_seconds

    def as_dict(self) -> dict[str, float | dict[str, int]]:
        bounds = [*(str(bound) for bound in BOUNDS), "+Inf"]
        return {
            "host_seconds": self.host_seconds,
            "model_seconds": self.model_seconds,
            "host_seconds_counts": dict(zip(bounds, self.counts, strict=True)),
        }
