"""POST /v1/completions: prompts as text or token ids, without a chat template."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from vlm_serve.engine.outputs import Delta
from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.body import read_json
from vlm_serve.server.completion_choice import CompletionChoiceState
from vlm_serve.server.fields import ignored_fields, ignored_header
from vlm_serve.server.generation import Generation, Task, answering
from vlm_serve.server.protocol import CompletionRequest
from vlm_serve.server.reports import add_usage, cache_report_body, usage_body
from vlm_serve.server.request_id import request_id_of
from vlm_serve.server.responses import CacheReportBody, Completion, UsageBody
from vlm_serve.server.service import Service
from vlm_serve.server.streaming import Chunks, stream_response, until_disconnected
from vlm_serve.server.tenants import salt_of

MAX_PROMPTS = 128


@dataclass(frozen=True, slots=True)
class CompletionTask:
    """A validated request: one task per prompt; choice `p * n + i` is the i-th of prompt p."""

    body: CompletionRequest
    tasks: Sequence[Task]
    params: SamplingParams
    model: str
    created: int

    @property
    def response_id(self) -> str:
        return f"cmpl-{self.tasks[0].request_id}"


def _prompts(body: CompletionRequest) -> list[str] | list[list[int]]:
    """The prompts as a list. Raises InvalidRequestError for none, too many or empty ones."""
    given: Any = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given or not all(given):
        raise InvalidRequestError("prompt must not be empty", param="prompt")
    if len(given) > MAX_PROMPTS:
        raise InvalidRequestError(f"at most {MAX_PROMPTS} prompts per request", param="prompt")
    prompts: list[str] | list[list[int]] = given
    return prompts


def preparing_tokens(service: Service, prompt: str | list[int], salt: str) -> Callable[[], Prompt]:
    """What makes the prompt of a text or of token ids; to be run on a preparation thread."""

    def prepare() -> Prompt:
        preprocessor = service.engine.preprocessor
        ids = preprocessor.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        made: Prompt = preprocessor.prepare_tokens(ids, cache_salt=salt)
        return made

    return prepare


async def completions(service: Service, request: Request) -> Response:
    """Continues one or several prompts, whole or as a stream. Raises as `chat_completions` does."""
    arrival = time.monotonic()
    body = await read_json(request, CompletionRequest, service.config.max_body_bytes)
    headers = ignored_header(ignored_fields(body.model_extra or {}))
    body.check_stream_options()
    params = body.sampling_params()
    request_id = body.request_id or request_id_of(request.scope)
    job = CompletionTask(
        body=body,
        tasks=[
            Task(
                preparing_tokens(service, prompt, salt_of(request.scope, body.cache_salt)),
                params,
                request_id,
                arrival,
                body.priority or 0,
                form_field=body.form_field,
            )
            for prompt in _prompts(body)
        ],
        params=params,
        model=service.resolve_model(body.model),
        created=int(time.time()),
    )
    if body.stream:
        return await stream_response(request, _chunks(service, job), headers, request_id)
    answer = await until_disconnected(request, _whole(service, job))
    return JSONResponse(answer.model_dump(), headers=headers)


async def _merged(
    service: Service, job: CompletionTask, generations: list[Generation]
) -> AsyncGenerator[tuple[CompletionChoiceState, Delta], None]:
    """Submits all prompts and yields their deltas as they come, each with its choice.

    `generations` is filled in the order of the prompts. All or nothing: an error in one ends all.
    """
    async with AsyncExitStack() as stack:
        for task in job.tasks:
            generations.append(await stack.enter_async_context(answering(service, task)))
        waiting: dict[asyncio.Future[Delta], int] = {}
        streams = [generation.deltas() for generation in generations]
        choices = [
            [
                CompletionChoiceState(service.tokenizer, job.body, p * job.params.n + i, g.prompt)
                for i in range(job.params.n)
            ]
            for p, g in enumerate(generations)
        ]

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
                    delta = future.result()
                    yield choices[number][delta.index], delta
                    ask(number)
        finally:
            for future in waiting:
                future.cancel()
            # Results nobody looks at: asyncio would report their errors as lost.
            await asyncio.gather(*waiting, return_exceptions=True)


async def _whole(service: Service, job: CompletionTask) -> Completion:
    generations: list[Generation] = []
    choices: dict[int, CompletionChoiceState] = {}
    async with aclosing(_merged(service, job, generations)) as merged:
        async for choice, delta in merged:
            choice.push(delta)
            choices[choice.index] = choice
    return Completion(
        id=job.response_id,
        created=job.created,
        model=job.model,
        choices=[choices[index].whole() for index in sorted(choices)],
        usage=_usage(job, generations),
        cache_report=_reports(generations) if job.body.cache_report else None,
    )


def _usage(job: CompletionTask, generations: list[Generation]) -> UsageBody:
    total = add_usage([generation.usage for generation in generations])
    if job.body.only_echo:
        total = dataclasses.replace(total, completion_tokens=0)
    return usage_body(total, *(generation.prompt for generation in generations))


def _reports(generations: list[Generation]) -> CacheReportBody | list[CacheReportBody] | None:
    """The prompt's report; a list of them if there are several prompts."""
    bodies = [cache_report_body(generation.cache_report) for generation in generations]
    found = [body for body in bodies if body is not None]
    return found[0] if len(bodies) == 1 and found else found or None


async def _chunks(service: Service, job: CompletionTask) -> Chunks:
    body = job.body
    generations: list[Generation] = []
    base: dict[str, Any] = {
        "id": job.response_id,
        "object": "text_completion",
        "created": job.created,
        "model": job.model,
    }
    with_usage = body.stream_option("include_usage")
    continuous = body.stream_option("continuous_usage_stats")

    def usage() -> dict[str, Any]:
        return _usage(job, generations).model_dump()

    def last_words() -> dict[str, Any]:
        if not body.cache_report:
            return {}
        reports = [dataclasses.asdict(g.cache_report) for g in generations if g.cache_report]
        return {"cache_report": reports[0] if len(generations) == 1 else reports}

    # Choices whose last delta has yet to be passed on; a generation may be ahead of that.
    unfinished = len(job.tasks) * job.params.n
    async with aclosing(_merged(service, job, generations)) as merged:
        async for choice, delta in merged:
            part = choice.push(delta)
            unfinished -= delta.finish_reason is not None
            if part is None:
                continue
            chunk = base | {"choices": [part.model_dump()]}
            if with_usage:
                chunk["usage"] = usage() if continuous else None
            elif not unfinished:
                chunk |= last_words()
            yield chunk
    if with_usage:
        yield base | {"choices": [], "usage": usage()} | last_words()
