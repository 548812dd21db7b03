"""From deltas to an answer: the one way that all APIs take, whole or as a stream."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.engine.outputs import Delta
from vlm_serve.errors import VlmServeError
from vlm_serve.server.answers.generation import Generation, Task, answering
from vlm_serve.server.failover.covering import Coverage, CoveredResponse
from vlm_serve.server.http.errors import envelope, public_error
from vlm_serve.server.http.streaming import Chunks, stream_response, until_disconnected
from vlm_serve.server.service import Service

Event = dict[str, Any]


class AnswerStream(ABC):
    """Turns the deltas of one request into the events of a stream.

    A whole answer goes through the same steps and keeps their result only, so the two cannot
    differ.
    """

    def start(self) -> list[Event]:
        """What comes before the events of the first delta."""
        return []

    @abstractmethod
    def push(self, prompt: int, delta: Delta) -> list[Event]:
        """Adds a delta of the request's prompt of that number; returns the events it causes."""

    def end(self) -> list[Event]:
        """What comes after the last delta."""
        return []

    def failed(self, error: VlmServeError) -> list[Event]:
        """The end of a stream that has begun and cannot go on."""
        return [envelope(error)]

    @abstractmethod
    def whole(self) -> BaseModel:
        """The answer after its last delta."""


@dataclass(frozen=True, slots=True)
class ResponseSpec:
    """How to respond to a validated request.

    Attributes:
        tasks: one per prompt.
        stream_of: makes the stream of the tasks' generations.
        stream: the answer is sent as a stream.
        headers: headers of the response.
        named: the stream's events have names, see `streaming.as_events`.
    """

    tasks: Sequence[Task]
    stream_of: Callable[[Sequence[Generation]], AnswerStream]
    stream: bool
    headers: Mapping[str, str]
    named: bool = False


async def respond(service: Service, request: Request, spec: ResponseSpec) -> Response:
    """Answers a request.

    Raises VlmServeError; ClientGoneError if nobody waits for the answer any more.
    """
    coverage = Coverage()
    if spec.stream:
        events = _events(service, spec, coverage)
        return await stream_response(
            request, events, spec.headers, named=spec.named, extra=coverage.take
        )
    answer = await until_disconnected(request, _whole(service, spec, coverage))
    return CoveredResponse(answer, spec.headers, coverage.take())


async def _whole(service: Service, spec: ResponseSpec, coverage: Coverage) -> str:
    """The answer as JSON. Log-probabilities are many times as long as the text that they are
    about: telling them does not keep the event loop."""
    params = [task.params for task in spec.tasks]
    long = any(each.logprobs is not None or each.prompt_logprobs is not None for each in params)
    async with _submitted(service, spec) as generations:
        answer, kept = spec.stream_of(generations), list[tuple[int, Delta]]()
        coverage.begin([generation.part for generation in generations])

        def made() -> str:
            for prompt, delta in kept:
                answer.push(prompt, delta)
            return answer.whole().model_dump_json()

        async with aclosing(_merged(generations)) as deltas:
            async for prompt, delta in deltas:
                coverage.add(prompt, delta)
                if long:
                    kept.append((prompt, delta))
                else:
                    answer.push(prompt, delta)
        return await service.workers.prepare(made) if long else made()


async def _events(service: Service, spec: ResponseSpec, coverage: Coverage) -> Chunks:
    """What goes wrong before the first event is raised; later it is an event itself, since the
    status has been sent."""
    async with _submitted(service, spec) as generations:
        answer = spec.stream_of(generations)
        coverage.begin([generation.part for generation in generations])
        sent = False
        try:
            async with aclosing(_merged(generations)) as deltas:
                async for prompt, delta in deltas:
                    coverage.add(prompt, delta)
                    events = [] if sent else answer.start()
                    events += answer.push(prompt, delta)
                    for event in events:
                        sent = True
                        yield event
        except Exception as error:
            if not sent:
                raise
            coverage.fail()
            for event in answer.failed(public_error(error, spec.tasks[0].request_id)):
                yield event
            return
        for event in answer.end():
            yield event


async def _in_turn(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Delta]]:
    streams = [generation.deltas() for generation in generations]
    unfinished = list(range(len(streams)))
    while unfinished:
        for number in list(unfinished):
            yield number, await anext(streams[number])
            if not generations[number].unfinished:
                unfinished.remove(number)


@asynccontextmanager
async def _submitted(service: Service, spec: ResponseSpec) -> AsyncIterator[list[Generation]]:
    """Submits all prompts. All or nothing: an error in one ends all."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(answering(service, task, patient=not spec.stream))
            for task in spec.tasks
        ]


async def _merged(
    generations: Sequence[Generation],
) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of all generations as they come, or of an attempt in turn, each with its
    generation's number."""
    if len(generations) == 1 or generations[0].part is not None:
        async for numbered in _in_turn(generations):
            yield numbered
        return
    waiting: dict[asyncio.Future[Delta], int] = {}
    streams = [generation.deltas() for generation in generations]

    def ask(number: int) -> None:
        if generations[number].unfinished:
            waiting[asyncio.ensure_future(anext(streams[number]))] = number

    try:
        for number in range(len(streams)):
            ask(number)
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                number = waiting.pop(future)
                yield number, future.result()
                ask(number)
    finally:
        for future in waiting:
            future.cancel()
        # Results nobody looks at: asyncio would report their errors as lost.
        await asyncio.gather(*waiting, return_exceptions=True)
