"""One prompt in the engine, seen from the event loop as a source of deltas.

Work in the background runs behind the requests of clients who wait for their answers
(`in_background`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from vlm_serve.engine.requests.outputs import CacheReport, Delta, PromptLogprobs, Usage
from vlm_serve.engine.requests.request import NextTurn
from vlm_serve.engine.requests.tenant import BACKGROUND, NOBODY, Tenant
from vlm_serve.engine.requests.thought import Thought
from vlm_serve.engine.requests.validation import check_logprobs
from vlm_serve.errors import EngineClosedError
from vlm_serve.grammar.state import Grammar
from vlm_serve.preprocess.identity.affinity import AffinityKey
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.answers.pieces import ReasoningParser, reasoning_form, thought_behind
from vlm_serve.server.failover.attempt import Attempt
from vlm_serve.server.failover.covering import AttemptPart
from vlm_serve.server.http.errors import RequestTimeoutError, renamed_params
from vlm_serve.server.http.request_memory import current_share
from vlm_serve.server.metrics import FinishedRequest
from vlm_serve.server.service import Preparation, Service
from vlm_serve.server.unread import MAX_UNREAD, UnreadDeltas
from vlm_serve.system.stopping import Stop

_log = logging.getLogger(__name__)

TOKEN_BYTES = 128
"""Memory of one prompt token: its id, positions, text, and its part of keys and spans."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt of a request and how to answer it.

    Attributes:
        prepare: makes the prompt, or a rendering whose media are still to be loaded. It runs on a
            preparation thread and may block.
        request_id: id in responses and logs. The engine gives its own id, since clients' ids may
            collide.
        arrival: monotonic time in seconds at which the request came in.
        reasoning: how the answer's reasoning is split off; a grammar and stop strings begin after
            it.
        calls: a tool call in the reasoning ends it.
        continued: the answer continues the prompt's last message.
        clamped: an answer longer than the context is cut there instead of refused.
        trace: headers of the trace that the request continues.
        names: internal field name -> the client's name for it, for errors.
        affinity: affinity keys of the prompt.
        attempt: the attempt that this request is; None: there will be no other attempt.
        number: index of the prompt in the request.
        pooled: a vector is wanted, not an answer.
        progress: the progress of the prompt is wanted.
        next_turn: what the next turn shares with a prompt and its answer; None: see
            `Engine.submit`.
        share: digest of the API key, whose turn it is where requests wait for each other.
        tenant: whom it counts for in the queue and in the model's steps.
    """

    prepare: Callable[[], Preparation]
    params: SamplingParams
    request_id: str
    arrival: float
    priority: int = 0
    reasoning: ReasoningParser = "none"
    calls: bool = False
    continued: bool = False
    clamped: bool = False
    trace: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    affinity: tuple[AffinityKey, ...] = ()
    attempt: Attempt | None = None
    number: int = 0
    pooled: bool = False
    progress: bool = False
    next_turn: Callable[[Task, Prompt], NextTurn | None] | None = None
    share: bytes = b""
    tenant: Tenant = NOBODY


class Generation:
    """A prompt submitted to the engine.

    Attributes:
        patient: deltas are delivered late; token times are the times at which they were made.
        stages: seconds of the preparation by stage.
        submitted_time: monotonic time at which the engine got the prompt.
        usage, cache_report: as of the last delta.
        prompt_logprobs: of the prompt's tokens from `prompt_logprobs_start` on, if requested.
        finish_reason: of the last choice that ended; "abort" until one has.
        unfinished: number of choices that have not ended.
        clamped: the answer may only be as long as the context allows, which is less than wanted.
    """

    def __init__(
        self,
        service: Service,
        task: Task,
        prompt: Prompt,
        stages: Mapping[str, float],
        *,
        patient: bool = False,
    ) -> None:
        self.task = task
        self.prompt = prompt
        self.stages = stages
        self.submitted_time = time.monotonic()
        self.usage = Usage(prompt_tokens=len(prompt))
        self.cache_report: CacheReport | None = None
        self.prompt_logprobs: tuple[PromptLogprobs, ...] | None = None
        self.finish_reason = "abort"
        self.unfinished = task.params.n
        self.clamped = False
        interval = 0.0 if patient else service.config.stream_interval / 1000
        self.queue = UnreadDeltas(MAX_UNREAD * task.params.n, interval)
        self.first_token_time: float | None = None
        self._state = service.state
        self.patient = patient
        self._token_times: dict[int, float] = {}
        self._is_new = True  # the latest tokens were not delivered before

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield the deltas of all choices, as many at a time as `_next` returns.

        Raises:
            VlmServeError: the engine ended the request with this error.
        """
        while self.unfinished:
            good, bad = await self._next(), None
            for place, delta in enumerate(good):
                if delta.finish_reason in ("abort", "error"):
                    good, bad = good[:place], delta
                    break
            if good:
                self.count(good)
                yield good
            if bad is None or not self.unfinished:
                continue
            if bad.error is None:
                # The client is still connected, so the engine aborted the request.
                raise EngineClosedError("the request was ended by the server", code="aborted")
            self.finish_reason = "error"
            with renamed_params(self.task.names):
                raise bad.error

    def count(self, deltas: Sequence[Delta]) -> None:
        """Count deltas that are about to be told."""
        now = time.monotonic()
        for delta in deltas:
            if delta.prompt_logprobs is not None:
                self.prompt_logprobs = delta.prompt_logprobs
            if delta.finish_reason is not None:
                self.unfinished -= 1
                self.finish_reason = delta.finish_reason
            self._report(delta)
            if delta.token_ids and self._is_new:
                self._state.num_generated_tokens += len(delta.token_ids)
                self._observe_token(delta.index, delta.time if self.patient else now)

    async def _next(self) -> list[Delta]:
        return await self.queue.take()

    def _report(self, delta: Delta) -> None:
        self.usage = delta.usage
        self.cache_report = delta.cache_report or self.cache_report

    def submission(self) -> tuple[SamplingParams, dict[str, Any]]:
        """Return the parameters for the engine, and further options of `Engine.submit`."""
        return self.task.params, {}

    def _observe_token(self, index: int, now: float) -> None:
        if self.first_token_time is None:
            self.first_token_time = now
            self._state.first_token_seconds.add(now - self.task.arrival)
        before = self._token_times.get(index)
        if before is not None:
            self._state.record_next_token(now - before)
        self._token_times[index] = now

    def finished(self) -> FinishedRequest:
        """Return the facts about the request, at its end."""
        reason = self.finish_reason
        if self.unfinished and reason != "error":
            reason = "abort"
        return FinishedRequest(
            request_id=self.task.request_id,
            trace=self.task.trace,
            choices=self.task.params.n,
            usage=self.usage,
            cache_report=self.cache_report,
            stages=self.stages,
            arrival=self.task.arrival,
            submitted=self.submitted_time,
            first_token=self.first_token_time,
            ended=time.monotonic(),
            reason=reason,
        )


class AttemptGeneration(Generation):
    """A prompt of an attempt; the deltas of its choices take turns.

    Attributes:
        part: the attempt's state for this prompt.
    """

    def __init__(self, service: Service, task: Task, *args: Any, **options: Any) -> None:
        assert task.attempt is not None
        super().__init__(service, task, *args, **options)
        self.part = AttemptPart(task.attempt, task.number, task.params)
        self._taken: deque[Delta] = deque()

    async def _next(self) -> list[Delta]:
        """Return one delta: how many come together must not show in what is delivered."""
        while (delta := self.part.next()) is None:
            if not self._taken:
                self._taken.extend(await self.queue.take())
            delta = self._taken.popleft()
            if delta.progress is not None or delta.finish_reason in ("abort", "error"):
                break
            self.part.add(delta)
        return [delta]

    def _report(self, delta: Delta) -> None:
        ended = not self.unfinished
        self.usage = self.part.usage(delta, ended=ended)
        self.cache_report = self.part.cache_report(delta, ended=ended)
        self._is_new = not self.part.replayed

    def submission(self) -> tuple[SamplingParams, dict[str, Any]]:
        # Missing expert rows would be a gap on one replica and none on another.
        options = {"forced": self.part.forced, "complete_experts": True}
        return self.part.seeded(self.task.params), options


@asynccontextmanager
async def answering(
    service: Service, task: Task, *, patient: bool = False
) -> AsyncIterator[Generation]:
    """Admit a request, prepare its prompt and submit it.

    Leaving the block before the end frees everything within one step.

    Args:
        patient: only the end of the answer is needed in time.

    Raises:
        DrainingError, OverloadedError, EngineClosedError: see `Admission.admitted`.
        RequestTimeoutError: the deadline has passed, here or in `Generation.deltas`.
        VlmServeError: see `Service.prepare`, `GrammarQueue.compile` and `Engine.submit`.
    """
    loop, stop, admission = asyncio.get_running_loop(), Stop(), service.admission
    with admission.admitted(
        task.tenant, resumed=task.attempt is not None and task.attempt.resumed > 0
    ):
        limit = _time_limit(service, task)
        deadline = None if limit is None else task.arrival - time.monotonic() + loop.time() + limit
        try:
            async with asyncio.timeout_at(deadline):
                with renamed_params(task.names):
                    prompt = await service.prepare(task.prepare, stop)
                    grammar = await _grammar(service, task, prompt)
                share = current_share()
                if share is not None:
                    await share.grow(share.size + _bytes_of(prompt))
        except TimeoutError:
            raise _timeout_error(service) from None
        given = task.params
        task = _within_context(task, service.engine.max_model_len - len(prompt))
        kind = Generation if task.attempt is None else AttemptGeneration
        generation = kind(service, task, prompt, stop.seconds, patient=patient)
        generation.clamped = task.params is not given
        queue = generation.queue
        with renamed_params(task.names):
            engine_id = _submit(service, generation, grammar)
        _log.debug("request %s is %s in the engine", task.request_id, engine_id)
        if not patient:
            queue.on_change = partial(service.engine.hold, engine_id)
        timer = None
        if deadline is not None:
            expiry = Delta(0, finish_reason="error", error=_timeout_error(service))
            timer = loop.call_at(deadline, queue.put, expiry)
        try:
            with admission.holding_tokens(task.tenant, len(prompt)):
                yield generation
        finally:
            queue.direct = None
            if generation.unfinished:
                service.engine.abort(engine_id)
            if timer is not None:
                timer.cancel()
            service.state.record_finished(generation.finished())


def _submit(service: Service, generation: Generation, grammar: Grammar | None) -> str:
    """Submit a prompt to the engine and return the engine's id for it."""
    engine, task, prompt = service.engine, generation.task, generation.prompt
    check_logprobs(task.params, engine.config.max_logprobs)
    if not engine.num_running + engine.num_waiting:
        service.state.busy_since = time.monotonic()
    params, options = generation.submission()
    return engine.submit(
        prompt,
        params,
        partial(service.mailbox.post, generation.queue, patient=generation.patient),
        priority=effective_priority(task.priority),
        tenant=task.tenant,
        grammar=grammar,
        affinity=task.affinity,
        thought=thought_of(task, prompt),
        pooled=task.pooled,
        progress=task.progress,
        next_turn=None if task.next_turn is None else task.next_turn(task, prompt),
        on_step=service.mailbox.hand_over,
        **options,
    )


def _within_context(task: Task, room: int) -> Task:
    """Return the task with an answer of at most `room` tokens, if the task allows that."""
    wanted = task.params.max_tokens
    if not task.clamped or wanted is None or wanted <= room or room < 1:
        return task
    return replace(task, params=replace(task.params, max_tokens=room))


def reasoning_parser_of(service: Service) -> ReasoningParser:
    """Return how reasoning is split off: as configured, or else as the chat template marks it."""
    configured = service.config.reasoning_parser
    return reasoning_form(configured, service.engine.preprocessor.template_traits)


def thought_of(task: Task, prompt: Prompt) -> Thought | None:
    """Return how the answer to a prompt may think; None if its reasoning is not split off."""
    return thought_behind(prompt.text, task.reasoning, continued=task.continued, calls=task.calls)


def _bytes_of(prompt: Prompt) -> int:
    """Return an upper bound of a prompt's bytes."""
    return len(prompt) * TOKEN_BYTES + sum(item.num_bytes for item in prompt.media)


async def _grammar(service: Service, task: Task, prompt: Prompt) -> Grammar | None:
    form = task.params.structured_outputs
    if form is None:
        return None
    splits = reasoning_parser_of(service) != "none"
    after = service.engine.before_grammar(prompt, thought_of(task, prompt), splits=splits)
    return await service.grammars.compile(form, after, prompt.keys.owners.prompt, task.share)


def _time_limit(service: Service, task: Task) -> float | None:
    """Return the request's time limit in seconds, counted from arrival; None means unlimited."""
    if task.attempt is None or task.attempt.deadline is None:
        return service.config.request_timeout
    return task.attempt.deadline - time.time() + time.monotonic() - task.arrival


def _timeout_error(service: Service) -> RequestTimeoutError:
    limit = service.config.request_timeout
    allowed = "allowed" if limit is None else f"{limit:g} s"
    return RequestTimeoutError(f"the request took longer than {allowed}", code="timeout")


BEHIND = 2 * BACKGROUND
"""Added to the priority of work in the background, which may be below zero."""

_offset: ContextVar[int] = ContextVar("priority_offset", default=0)


@contextmanager
def in_background() -> Iterator[None]:
    """Run the requests that are made inside the block behind all others."""
    token = _offset.set(BEHIND)
    try:
        yield
    finally:
        _offset.reset(token)


def effective_priority(priority: int) -> int:
    """Return the engine's priority for a request's own; lower values run first."""
    return priority + _offset.get()
