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

from vlm_serve.engine.core.executor import Executor, ExecutorLostError, StepError
from vlm_serve.engine.core.media import MediaLoading, MediaPlanner
from vlm_serve.engine.core.scheduler import Event, Scheduler
from vlm_serve.engine.requests.plan import StepPlan
from vlm_serve.engine.requests.request import Request
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.errors import EngineClosedError, MediaError, VlmServeError
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.sampling_params import SamplingParams
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
        scheduler: decides what runs.
        executor: computes it.
        media: tells which media have to be decoded.
        preprocessor: closed with the loop.
        check: raises the error of a prompt that cannot be served with its sampling parameters.
        group: prepares a request that does not come from a caller.

    Attributes:
        num_steps: number of steps.
        last_step_time: see `hooks.Loop`.
        step_times: time of steps outside of the model.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        media: MediaPlanner,
        preprocessor: Preprocessor,
        *,
        check: Callable[[Prompt, SamplingParams], None],
        group: Callable[[Request], SequenceGroup],
    ) -> None:
        self.num_steps = 0
        self.last_step_time = time.monotonic()
        self.step_times = StepTimes()
        self._scheduler = scheduler
        self._hooks = scheduler.hooks
        self._executor = executor
        self._make_group = group
        self._preprocessor = preprocessor
        self._media_loader = MediaLoading(media, self.post, self._fail_request, self._restart)
        self._check = check
        self._ending: ExecutorLostError | None = None
        self._groups: dict[str, SequenceGroup] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._stopping = False
        self._lock = threading.Lock()
        self._step_began = time.perf_counter()
        self._under_way: tuple[StepPlan, float] | None = None
        self._thread = threading.Thread(target=self._run, name="vlm-serve-engine", daemon=True)

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
        return len(self._scheduler.running)

    @property
    def has_idle_callers(self) -> bool:
        """True if a caller's request waits for anything but a running prefill."""
        return self._scheduler.has_idle_callers

    # -- called from any thread --------------------------------------------------------------------

    def start(self) -> None:
        for attach in self._hooks.attach:
            attach(self)
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
                self._publish()
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

    def _publish(self) -> None:
        for notice in self._hooks.on_published:
            notice()

    def _end_what_is_due(self) -> None:
        for notice in self._hooks.on_time[:]:
            notice()

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

    def submit(self, request: Request) -> None:
        """Queue a request that does not come from a caller."""
        self.add(self._make_group(request))

    def find(self, request_id: str) -> SequenceGroup | None:
        """Return a request that has not ended."""
        return self._groups.get(request_id)

    @property
    def groups(self) -> list[SequenceGroup]:
        """The requests that have not ended."""
        return list(self._groups.values())

    def abort(self, request_id: str) -> None:
        """End a request. Ignore unknown ids."""
        group = self.find(request_id)
        if group is not None:
            self._emit(self._scheduler.end(group))

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._handle_commands():
                if self._has_work and self._step():
                    now = time.perf_counter()
                    self.step_times.record(now - self._step_began, self._executor.model_seconds)
                    self._step_began = now
                for notice in self._hooks.on_idle:
                    notice()
                self._forget_removed()
                self._publish()
        except ExecutorLostError as error:
            _log.critical("the engine ends: %s", error)
            self._ending, self._closed = error, True
        except BaseException:
            _log.exception("the engine's thread died")
            self._closed = True
        finally:
            self._end_all()

    @property
    def _has_work(self) -> bool:
        return self._under_way is not None or self._scheduler.has_work

    def _handle_commands(self) -> bool:
        """Run posted commands; wait for one if there is no other work. Return False to end the
        loop."""
        while not self._stopping:
            wait = not self._has_work
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
            left = min((left() for left in self._hooks.seconds_left), default=None)
            command = self._inbox.get(block=wait, timeout=left)
        except queue.Empty:
            if wait:
                self._end_what_is_due()
            raise
        if wait:
            self._step_began = time.perf_counter()
        self._end_what_is_due()
        if command is None:
            self._stopping = True
        else:
            command()
            self._forget_removed()
        self._publish()

    def _step(self) -> bool:
        """Run one step. Return False if none could be planned and the loop only waited."""
        self._end_what_is_due()
        if self._under_way is not None:
            return self._finish(*self._under_way)
        plan = self._scheduler.plan()
        failures = self._scheduler.take_failures()
        self._emit(failures)
        self._media_loader.start()
        for notice in self._hooks.on_planned:
            notice()
        if plan is None:
            if failures or not self._scheduler.has_work:
                return False
            with contextlib.suppress(queue.Empty):
                if any(busy() for busy in self._hooks.is_busy):
                    self._run_next_command(wait=True)
                elif not self._scheduler.running and self._scheduler.waiting:
                    self._emit(self._scheduler.reject_head())
                elif self._media_loader.busy:
                    self._run_next_command(wait=True)
            return False
        began = time.perf_counter()
        if self._executor.steps_ahead:
            self._executor.submit(plan)
        return self._finish(plan, began)

    def _finish(self, plan: StepPlan, began: float) -> bool:
        """Have the device begin the next step, if that can be planned already. Then wait for this
        one, and commit it."""
        self._under_way, scheduler, executor = None, self._scheduler, self._executor
        ahead = scheduler.plan_ahead(plan) if executor.steps_ahead else None
        if ahead is not None:
            executor.submit(ahead)
        try:
            output = executor.collect() if executor.steps_ahead else executor.run(plan)
        except ExecutorLostError:
            raise
        except Exception as error:
            events = self._fail(plan, error, void=ahead is not None)
        else:
            collected = time.perf_counter()
            scheduler.learn(plan, output, collected - began)
            events = scheduler.commit(plan, output)
            if ahead is not None:
                self._under_way = ahead, collected
        # Publish before the deltas: a client may inspect the cache once it has an answer.
        self._publish()
        self._emit(events)
        self.num_steps += 1
        self.last_step_time = time.monotonic()
        return True

    def _fail(self, plan: StepPlan, error: Exception, *, void: bool) -> list[Event]:
        """Roll a failed step back. With `void` another one is under way, which it has made
        void."""
        failure = error if isinstance(error, StepError) else StepError(error, "unknown")
        if not isinstance(failure.cause, VlmServeError):
            _log.exception("a step failed; its sequences are retried one by one")
        if void:
            with contextlib.suppress(StepError):
                self._executor.collect()
        return self._scheduler.fail(plan, failure)

    def _emit(self, events: list[Event]) -> None:
        for group, delta in events:
            request = group.request
            if delta.usage.completion_tokens == 1:
                for notice in self._hooks.on_answering:
                    notice(group)
            if group.finished:
                self._media_loader.forget(group)
            if group.finished and self._groups.pop(request.request_id, None) is not None:
                for notice in self._hooks.on_finished:
                    notice(group)
            try:
                request.on_delta(delta)
            except Exception:
                _log.exception("a callback of request %s raised", request.request_id)
        for told in dict.fromkeys(group.request.on_step for group, _ in events):
            if told is not None:
                told()
        for group, _ in events:  # not before: others of them may be of the same group
            if group.finished:
                group.part()

    def _forget_removed(self) -> None:
        """Tell the executor which sequences it needs no longer."""
        for number in self._scheduler.take_removed():
            self._executor.forget(number)

    def _fail_request(self, group: SequenceGroup, error: VlmServeError) -> None:
        self._emit(self._scheduler.end(group, error))

    def _restart(self, group: SequenceGroup, prompt: Prompt) -> None:
        """Restart a request whose medium differs from its record, with the corrected prompt. If the
        answer has begun, end the request with an error instead."""
        request = replace(group.request, prompt=prompt)
        try:
            if any(sequence.num_generated for sequence in group.sequences):
                raise MediaError("a medium differs from its record, and the answer has begun")
            self._check(prompt, request.params)
        except VlmServeError as error:
            self._fail_request(group, error)
            return
        self._scheduler.end(group)
        self._media_loader.forget(group)
        self.submit(request)

    def _end_all(self) -> None:
        """End all requests with an error and close everything, so that no client waits for ever."""
        with self._lock:
            self._closed = True
        self._media_loader.close()
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
        for close in self._hooks.close:
            close()
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
