"""Turning deltas into a response, streamed or complete. All APIs share this path."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Scope

from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.errors import VlmServeError
from vlm_serve.preprocess.identity.keys import KeyScope
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.answers.generation import AttemptGeneration, Generation, Task, answering
from vlm_serve.server.api.shared.fields import AnswerRequest
from vlm_serve.server.api.shared.request_body import read_prompt
from vlm_serve.server.failover.attempt import ATTEMPT, Attempt
from vlm_serve.server.failover.covering import Coverage, CoveredResponse
from vlm_serve.server.http.auth import share_of
from vlm_serve.server.http.errors import error_event, public_error
from vlm_serve.server.http.request_id import request_id_of, trace_context_of
from vlm_serve.server.http.streaming import (
    DONE,
    Direct,
    Event,
    Events,
    stream_response,
    until_disconnected,
)
from vlm_serve.server.http.tenants import tenant_of
from vlm_serve.server.service import Preparation, Service

B = TypeVar("B", bound=AnswerRequest)
Numbered = AsyncGenerator[tuple[int, list[Delta]], None]


class AnswerStream(ABC):
    """Turns the deltas of one request into the events of a stream.

    A complete response takes the same steps and keeps only their result, so the two cannot differ.
    """

    def start(self) -> list[Event]:
        """Return the events before those of the first delta."""
        return []

    @abstractmethod
    def push(self, prompt: int, deltas: Sequence[Delta]) -> list[Event]:
        """Add deltas of one prompt, at least one, and return the resulting events. Text of the same
        kind shares an event.

        Args:
            prompt: index of the prompt in the request.
        """

    def end(self) -> list[Event]:
        """Return the events after those of the last delta."""
        return []

    def failed(self, error: VlmServeError) -> list[Event]:
        """Return the last events of a stream that has begun; none: the error's own event."""
        return []

    @abstractmethod
    def result(self) -> BaseModel:
        """Return the complete response body, after the last delta."""

    def keep(self) -> None:
        """Store what later requests may name, on the event loop, after `result`."""
        return


@dataclass(frozen=True, slots=True)
class ResponseSpec:
    """How to respond to a validated request.

    Attributes:
        tasks: one per prompt.
        stream_of: makes the stream for the tasks' generations.
        stream: send the response as a stream.
        headers: headers of the response.
        named: the stream's events have names, see `streaming.Direct`.
    """

    tasks: Sequence[Task]
    stream_of: Callable[[Sequence[Generation]], AnswerStream]
    stream: bool
    headers: Mapping[str, str]
    named: bool = False


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as it came in.

    Attributes:
        scope: its ASGI scope.
        arrival: monotonic time in seconds.
    """

    service: Service
    scope: Scope
    arrival: float

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that the request is; None: there will be no other attempt."""
        return self.scope.get(ATTEMPT)

    @property
    def created(self) -> int:
        """Unix time in seconds for the answer."""
        return int(time.time()) if self.attempt is None else self.attempt.created

    def key_scope(self, body: AnswerRequest) -> KeyScope:
        """Return whose prompts the request's are."""
        return self.service.state.key_scope(self.scope, body.model, body.cache_salt)

    def task(
        self,
        body: AnswerRequest,
        prepare: Callable[[], Preparation],
        params: SamplingParams,
        **others: Any,
    ) -> Task:
        """Return the task of one prompt; `others` are further fields of it."""
        return Task(
            prepare,
            params,
            body.request_id or request_id_of(self.scope),
            self.arrival,
            body.priority or 0,
            trace=trace_context_of(self.scope),
            attempt=self.attempt,
            progress=body.tells_progress and not (self.attempt and self.attempt.delivered),
            share=share_of(self.scope),
            tenant=tenant_of(self.scope),
            **others,
        )


async def answer_prompt(
    service: Service,
    request: Request,
    api: str,
    model: type[B],
    spec_of: Callable[[Incoming, B, Conversation], ResponseSpec],
    *reading: Any,
) -> Response:
    """Read a request's body and respond to it; it raises as `read_prompt` and `respond` do.

    Args:
        api, model: see `read_prompt`.
        spec_of: returns how to respond to a body and the conversation in it.
        reading: further arguments of `read_prompt`.
    """
    incoming = Incoming(service, request.scope, time.monotonic())
    spec = await read_prompt(service, request, api, model, partial(spec_of, incoming), *reading)
    return await respond(service, request, spec)


async def respond(service: Service, request: Request, spec: ResponseSpec) -> Response:
    """Respond to a request.

    Raises:
        VlmServeError: the request failed before its response began.
        ClientGoneError: the client disconnected.
    """
    coverage = None if spec.tasks[0].attempt is None else Coverage()
    if spec.stream:
        begun, silence = asyncio.Event(), service.config.stream_silence
        direct = Direct(request.scope, named=spec.named)
        refused = partial(error_event, request.scope)
        events = _events(service, spec, coverage, begun, direct, refused)
        extra = dict if coverage is None else coverage.take
        return await stream_response(request, events, spec.headers, begun, silence, direct, extra)
    answer = await until_disconnected(request, _complete(service, spec, coverage))
    headers = dict(spec.headers)
    if coverage is None:
        return Response(answer, headers=headers, media_type="application/json")
    return CoveredResponse(answer, headers, coverage.take())


async def _complete(service: Service, spec: ResponseSpec, coverage: Coverage | None) -> str:
    """Return the complete response body as JSON.

    Log-probabilities and vectors make a response many times longer. With them, the body is built on
    a preparation thread, so that it does not block the event loop.
    """
    params = [task.params for task in spec.tasks]
    long = any(
        options.logprobs is not None or options.prompt_logprobs is not None for options in params
    )
    long = long or any(task.pooled for task in spec.tasks)
    async with _submitted(service, spec) as generations:
        answer, deferred = spec.stream_of(generations), list[tuple[int, list[Delta]]]()

        def build() -> str:
            for prompt, deltas in deferred:
                answer.push(prompt, deltas)
            return answer.result().model_dump_json()

        async with aclosing(_merged(generations, coverage)) as arriving:
            async for prompt, deltas in arriving:
                if long:
                    deferred.append((prompt, deltas))
                else:
                    answer.push(prompt, deltas)
        body = await service.workers.prepare(build) if long else build()
        answer.keep()
        return body


async def _events(
    service: Service,
    spec: ResponseSpec,
    coverage: Coverage | None,
    begun: asyncio.Event,
    direct: Direct,
    refused: Callable[[VlmServeError], Event],
) -> Events:
    """Yield the events of a streamed response, as many together as have come.

    An error before the status has been sent, with the first event or when `begun` was set, is
    raised. A later one becomes an event itself.
    """
    sent: AnswerStream | None = None
    try:
        async with _submitted(service, spec) as generations:
            answer = spec.stream_of(generations)
            if coverage is None and len(generations) == 1:
                generations[0].queue.direct = partial(_tell, generations[0], answer, direct)
            async with aclosing(_merged(generations, coverage)) as arriving:
                async for prompt, deltas in arriving:
                    events = answer.start() if sent is None else []
                    events += answer.push(prompt, deltas)
                    if coverage is not None and deltas[0].progress is not None:
                        coverage.aside()
                    if events:
                        sent = answer
                        yield direct.bytes_of(events)
            if last := answer.end():
                yield direct.bytes_of(last)
    except Exception as error:
        if sent is None and not begun.is_set():
            raise
        if coverage is not None:
            coverage.fail()
        problem = public_error(error, spec.tasks[0].request_id)
        yield direct.bytes_of((sent and sent.failed(problem)) or [refused(problem)])
    if not spec.named:
        yield DONE


def _tell(
    generation: Generation, answer: AnswerStream, direct: Direct, deltas: Sequence[Delta]
) -> bool:
    """Tell deltas in the middle of an answer without its task; return False if the task has to."""
    if not direct.ready():
        return False
    generation.count(deltas)
    direct.send(answer.push(0, deltas))
    return True


async def _round_robin(generations: Sequence[Generation]) -> Numbered:
    streams = [generation.deltas() for generation in generations]
    unfinished = list(range(len(streams)))
    while unfinished:
        for number in list(unfinished):
            yield number, await anext(streams[number])
            if not generations[number].unfinished:
                unfinished.remove(number)


@asynccontextmanager
async def _submitted(service: Service, spec: ResponseSpec) -> AsyncIterator[list[Generation]]:
    """Submit all prompts. If one fails, all of them end."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(answering(service, task, patient=not spec.stream))
            for task in spec.tasks
        ]


def _merged(generations: Sequence[Generation], coverage: Coverage | None) -> Numbered:
    """Return the deltas of all generations, each with its generation's index.

    Those of an attempt come round-robin, so that every attempt has the same order.
    """
    if coverage is not None:
        parts = [cast(AttemptGeneration, generation).part for generation in generations]
        return coverage.covering(parts, _round_robin(generations))
    return _round_robin(generations) if len(generations) == 1 else _arriving(generations)


async def _arriving(generations: Sequence[Generation]) -> Numbered:
    """Yield the deltas of all generations as they arrive."""
    pending: dict[asyncio.Future[list[Delta]], int] = {}
    streams = [generation.deltas() for generation in generations]

    def request_next(number: int) -> None:
        if generations[number].unfinished:
            pending[asyncio.ensure_future(anext(streams[number]))] = number

    try:
        for number in range(len(streams)):
            request_next(number)
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                number = pending.pop(future)
                yield number, future.result()
                request_next(number)
    finally:
        for future in pending:
            future.cancel()
        # Retrieve their results: asyncio would report unretrieved errors.
        await asyncio.gather(*pending, return_exceptions=True)
