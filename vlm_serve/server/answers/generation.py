"""One prompt in the engine, seen from the event loop as a source of deltas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from vlm_serve.engine.outputs import CacheReport, Delta, Usage
from vlm_serve.engine.plan import PromptLogprobs
from vlm_serve.errors import EngineClosedError
from vlm_serve.grammar.state import Grammar
from vlm_serve.preprocess.affinity import AffinityKey
from vlm_serve.preprocess.prompt import Prompt
from vlm_serve.preprocess.stopping import Stop
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.answers.pieces import THINK_END, THINK_START
from vlm_serve.server.failover.attempt import Attempt
from vlm_serve.server.failover.attempt_part import AttemptPart
from vlm_serve.server.http.errors import RequestTimeoutError, told_as
from vlm_serve.server.http.request_memory import current_share
from vlm_serve.server.service import Preparation, Service

_access = logging.getLogger("vlm_serve.access")

_TURN = "<|im_start|>"

TOKEN_BYTES = 128
"""Of a prompt: its id, its positions, its part of the text, of the keys and of the spans."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a route wants answered.

    Attributes:
        prepare: makes the prompt, or a rendering whose media are yet to be loaded; runs on a
            preparation thread and may block.
        request_id: for responses and the log; the engine gets an id of its own, since clients' ids
            may collide.
        arrival: monotonic seconds at which the request came in.
        reasoning: reasoning is split from the answer, whose grammar begins behind it.
        continued: the answer goes on with the prompt's last message.
        trace: headers of the trace that the request continues.
        names: fields as they are called here -> as the client calls them, for errors.
        affinity: keys of what the prompt begins with.
        attempt: which try to answer the request this is; None: there will be no other.
        number: of the prompt among the request's.
    """

    prepare: Callable[[], Preparation]
    params: SamplingParams
    request_id: str
    arrival: float
    priority: int = 0
    reasoning: bool = False
    continued: bool = False
    trace: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    affinity: tuple[AffinityKey, ...] = ()
    attempt: Attempt | None = None
    number: int = 0


class Generation:
    """A request that has been submitted.

    Args:
        patient: its deltas come late, and count from when they were made.

    Attributes:
        stages: seconds that its preparation took, by stage.
        submitted_time: at which the engine got it.
        usage, cache_report: as of the last delta.
        prompt_logprobs: of the prompt's tokens from `prompt_logprobs_start` on, if asked for.
        finish_reason: of the last choice that ended; "abort" while there is none.
        unfinished: choices that have not ended.
        part: what the task's attempt means for it, if it is one.
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
        self.queue: asyncio.Queue[Delta] = asyncio.Queue()
        self.part: AttemptPart | None = None
        if task.attempt is not None:
            self.part = AttemptPart(task.attempt, task.number, task.params)
        self.first_token_time: float | None = None
        self._service = service
        self._patient = patient
        self._token_times: dict[int, float] = {}

    async def deltas(self) -> AsyncIterator[Delta]:
        """The deltas of all choices: as they come, or of an attempt in turn. Raises the error with
        which the engine ended the request."""
        while self.unfinished:
            delta = await self._next()
            if delta.error is not None:
                self.finish_reason = "error"
                with told_as(self.task.names):
                    raise delta.error
            if delta.finish_reason == "abort":
                # The client is still here, so it was the engine that gave up.
                raise EngineClosedError("the request was ended by the server", code="aborted")
            if delta.prompt_logprobs is not None:
                self.prompt_logprobs = delta.prompt_logprobs
            if delta.finish_reason is not None:
                self.unfinished -= 1
                self.finish_reason = delta.finish_reason
            self._report(delta)
            if delta.token_ids and not (self.part is not None and self.part.replayed):
                self._service.num_generated_tokens += len(delta.token_ids)
                now = delta.time if self._patient else time.monotonic()
                self._observe_token(delta.index, now)
            yield delta

    async def _next(self) -> Delta:
        if self.part is None:
            return await self.queue.get()
        while (delta := self.part.next()) is None:
            delta = await self.queue.get()
            if delta.finish_reason in ("abort", "error"):
                return delta
            self.part.sort(delta)
        return delta

    def _report(self, delta: Delta) -> None:
        if self.part is None:
            self.usage = delta.usage
            self.cache_report = delta.cache_report or self.cache_report
        else:
            ended = not self.unfinished
            self.usage = self.part.usage(delta, ended=ended)
            self.cache_report = self.part.cache_report(delta, ended=ended)

    def _observe_token(self, index: int, now: float) -> None:
        service = self._service
        if self.first_token_time is None:
            self.first_token_time = now
            service.recent_first_tokens.add(now - self.task.arrival)
        before = self._token_times.get(index)
        if before is not None:
            service.metrics.inter_token_latency.observe(now - before)
            service.recent_tokens.add(now - before)
        self._token_times[index] = now


@asynccontextmanager
async def answering(
    service: Service, task: Task, *, patient: bool = False
) -> AsyncIterator[Generation]:
    """Lets a request in, prepares its prompt and submits it. Leaving the block before the end frees
    everything within one step.

    Args:
        patient: nobody looks at the answer before its end.

    Raises:
        OverloadedError and its kin: see `Service.admitted`.
        RequestTimeoutError: the deadline has passed (here or from `Generation.deltas`).
        VlmServeError: what preparation and `Engine.submit` raise.
    """
    loop, stop = asyncio.get_running_loop(), Stop()
    with service.admitted(resumed=task.attempt is not None and task.attempt.resumed > 0):
        limit = _seconds(service, task)
        deadline = None if limit is None else task.arrival - time.monotonic() + loop.time() + limit
        try:
            async with asyncio.timeout_at(deadline):
                with told_as(task.names):
                    prompt = await service.prepared(task.prepare, stop)
                    grammar = await _grammar(service, task, prompt)
                share = current_share()
                if share is not None:
                    await share.cover(share.size + _bytes_of(prompt))
        except TimeoutError:
            raise _too_late(service) from None
        generation = Generation(service, task, prompt, stop.seconds, patient=patient)
        mailbox, queue = service.mailbox, generation.queue
        with told_as(task.names):
            engine_id = service.submit(
                prompt,
                task.params,
                lambda delta: mailbox.post(queue, delta, patient=patient),
                task.priority,
                grammar,
                task.affinity,
                generation.part,
            )
        service.open_tokens += len(prompt)
        alarm = None
        if deadline is not None:
            late = Delta(0, finish_reason="error", error=_too_late(service))
            alarm = loop.call_at(deadline, queue.put_nowait, late)
        try:
            yield generation
        finally:
            if generation.unfinished:
                service.engine.abort(engine_id)
            if alarm is not None:
                alarm.cancel()
            service.open_tokens -= len(prompt)
            _account(service, generation)


def begins_in_thought(prompt: str, *, continued: bool) -> bool:
    """True if the answer to a prompt with this text begins inside of a `<think>` block.

    Args:
        continued: the answer goes on with the last message, whose thought may be open. One begins
            where the message or its text does; elsewhere `<think>` is a word of the text.
    """
    if not continued:
        return prompt.rstrip().endswith(THINK_START)
    turn = prompt.rfind(_TURN)
    if turn < 0:
        return prompt.rfind(THINK_START) > prompt.rfind(THINK_END)
    said = prompt[turn:].partition("\n")[2].rpartition(THINK_END)[2]
    return said.lstrip().startswith(THINK_START)


def _bytes_of(prompt: Prompt) -> int:
    """Most that a prompt takes until its request ends."""
    return len(prompt) * TOKEN_BYTES + sum(item.num_bytes for item in prompt.media)


async def _grammar(service: Service, task: Task, prompt: Prompt) -> Grammar | None:
    form = task.params.structured_outputs
    if form is None:
        return None
    thinks = task.reasoning and begins_in_thought(prompt.text, continued=task.continued)
    return await service.compile(form, THINK_END.encode() if thinks else b"")


def _seconds(service: Service, task: Task) -> float | None:
    """That the request may take from its arrival on, None if there is no limit."""
    if task.attempt is None or task.attempt.deadline is None:
        return service.config.request_timeout
    return task.attempt.deadline - time.time() + time.monotonic() - task.arrival


def _too_late(service: Service) -> RequestTimeoutError:
    limit = service.config.request_timeout
    allowed = "allowed" if limit is None else f"{limit:g} s"
    return RequestTimeoutError(f"the request took longer than {allowed}", code="timeout")


def _account(service: Service, generation: Generation) -> None:
    """Metrics and the access log's line of one request, whatever its end was."""
    now, arrival = time.monotonic(), generation.task.arrival
    usage, report = generation.usage, generation.cache_report
    first, reason = generation.first_token_time, generation.finish_reason
    if generation.unfinished and reason != "error":
        reason = "abort"
    service.metrics.finished(reason, usage, report)
    service.metrics.e2e_request_latency.observe(now - arrival)
    if first is not None:
        service.metrics.time_to_first_token.observe(first - arrival)
    _access.info(
        "request_id=%s prompt_tokens=%d cached_tokens=%d completion_tokens=%d prepare_ms=%.1f "
        "stages_ms=%s ttft_ms=%s "
        "total_ms=%.1f finish_reason=%s cache_reason=%s",
        generation.task.request_id,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        (generation.submitted_time - arrival) * 1000,
        ",".join(f"{name}:{1000 * value:.1f}" for name, value in generation.stages.items()),
        f"{(first - arrival) * 1000:.1f}" if first is not None else "-",
        (now - arrival) * 1000,
        reason,
        report.reason if report is not None else "-",
    )
    if service.tracer is not None:
        service.tracer.record(generation, reason)
