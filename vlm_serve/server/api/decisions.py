"""POST /v1/decisions (OpenAI's) and /v1/systemone (that of `transformers serve`): typed questions
about one input, answered with probabilities.

Each question is a prompt behind the input, which is computed once for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.engine.requests.pooling import telling
from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.decisions.asking import Answer, Asked, ask, check_mass
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.decisions import (
    Question,
    assets_of,
    read_questions,
    read_system_one,
)
from vlm_serve.server.answers.generation import Generation, Task, answering
from vlm_serve.server.api.shared.answer import Incoming
from vlm_serve.server.api.shared.conversation import ParsedRequest
from vlm_serve.server.api.shared.fields import (
    AnswerRequest,
    CacheReportBody,
    Items,
    Optional,
    PromptCacheOptions,
    Table,
    add_usage,
    cache_report_body,
    usage_body,
)
from vlm_serve.server.api.shared.request_body import affinity_of, read_prompt
from vlm_serve.server.api.shared.sampling import ToolChoice
from vlm_serve.server.api.shared.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.http.streaming import until_disconnected
from vlm_serve.server.service import Service


class QuestionsRequest(AnswerRequest):
    """The fields that both bodies share."""

    refuse_below: float | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    chat_template_kwargs: Table[Any] | None = None
    mm_processor_kwargs: Table[Any] | None = None
    media_io_kwargs: Table[Any] | None = None


class DecisionsRequest(QuestionsRequest):
    input: str | Items[Table[Any]]
    questions: Items[Table[Any]]


class SystemOneRequest(QuestionsRequest):
    state: Any
    questions: Table[Table[Any]]
    assets: Table[Table[Any]] | None = None


class OptionProbability(BaseModel):
    """The probability of a choice by its value, or of a level by its number and label."""

    value: str | bool | int
    label: Optional[str] = None
    probability: float


class DecisionAnswer(BaseModel):
    """An answer; the fields beside `type` and `name` depend on the type."""

    type: Literal["predicate", "choice", "score", "refusal"]
    name: str | None
    probability: Optional[float] = None
    choice: Optional[str | bool] = None
    score: Optional[float] = None
    confidence: Optional[float] = None
    probabilities: Optional[list[OptionProbability]] = None


class Judged(BaseModel):
    """The fields that both responses share. The usage counts the input for each prompt; reports are
    those of the prompts, in their order, if these may use the cache."""

    model: str
    usage: dict[str, Any]
    cache_report: Optional[list[CacheReportBody]] = None


class Decision(Judged):
    answers: list[DecisionAnswer]


class SystemOne(Judged):
    answers: dict[str, dict[str, Any]]


async def decisions(service: Service, request: Request) -> Response:
    """Answer questions about an input. It raises as `_answer` does."""

    def questions_of(body: DecisionsRequest, ignored: list[str]) -> list[Question]:
        return read_questions(body.questions, ignored)

    def made(answers: list[Answer], shared: dict[str, Any]) -> Decision:
        return Decision(answers=list(map(_decided, answers)), **shared)

    return await _answer(service, request, "decisions", DecisionsRequest, questions_of, made)


async def systemone(service: Service, request: Request) -> Response:
    """Answer named questions about a state. It raises as `_answer` does."""

    def questions_of(body: SystemOneRequest, ignored: list[str]) -> list[Question]:
        return read_system_one(body.questions, assets_of({"assets": body.assets}))

    def made(answers: list[Answer], shared: dict[str, Any]) -> SystemOne:
        return SystemOne(answers={str(each.name): _judged(each) for each in answers}, **shared)

    return await _answer(service, request, "systemone", SystemOneRequest, questions_of, made)


def _decided(answer: Answer) -> DecisionAnswer:
    """Return an answer in the form of `openai.types.Decision`."""
    kind = answer.question.kind
    if answer.refused:
        return DecisionAnswer(type="refusal", name=answer.name)
    if kind == "predicate":
        return DecisionAnswer(type=kind, name=answer.name, probability=answer.probability)
    pairs = zip(answer.question.options, answer.probabilities, strict=True)
    told = [
        OptionProbability(value=option.value, probability=each)
        if kind == "choice"
        else OptionProbability(value=at, label=option.value, probability=each)
        for at, (option, each) in enumerate(pairs)
    ]
    found: dict[str, Any] = {kind: answer.choice if kind == "choice" else answer.score}
    return DecisionAnswer(
        type=kind, name=answer.name, confidence=answer.confidence, probabilities=told, **found
    )


def _judged(answer: Answer) -> dict[str, Any]:
    """Return an answer in the form of System One."""
    kind, options = answer.question.kind, answer.question.options
    if answer.refused:
        return {"type": "refusal"}
    if kind == "predicate":
        return {"type": "noul", "noul": answer.probability}
    found: dict[str, Any] = {"type": kind, "confidence": answer.confidence}
    pairs = zip(options, answer.probabilities, strict=True)
    found["probabilities"] = {option.name: each for option, each in pairs}
    if kind == "choice":
        return found | {"choice": answer.choice}
    legend = {option.name: option.value for option in options}
    return found | {"score": answer.score, "legend": legend}


B = TypeVar("B", bound=QuestionsRequest)
Reply = Callable[[list[Answer], dict[str, Any]], BaseModel]
"""Makes a response of the answers and of the fields that both responses share."""
Told = tuple[Generation, Mapping[int, float]]


async def _answer(
    service: Service,
    request: Request,
    api: str,
    model: type[B],
    questions_of: Callable[[B, list[str]], list[Question]],
    reply: Reply,
) -> Response:
    """Answer the questions of a request, which has no stream.

    Raises:
        VlmServeError: see `read_prompt` and `answering`.
        ClientGoneError: the client disconnected.
    """
    incoming = Incoming(service, request.scope, monotonic())
    tokenizer, traits = service.tokenizer, service.engine.preprocessor.template_traits

    def read(body: B, about: Conversation) -> tuple[B, Mapping[str, str], list[Asked], list[Task]]:
        if body.stream:
            raise InvalidRequestError("stream is not possible here", param="stream")
        check_mass(body.refuse_below or 0.0)
        about.ignored += (body.prompt_cache_options or PromptCacheOptions()).ignored
        headers = ignored_header(ignored_fields(body.model_extra or {}), about.ignored)
        asked = ask(about, questions_of(body, about.ignored), tokenizer, traits)
        prompts = enumerate(prompt for each in asked for prompt in each.prompts)
        return body, headers, asked, [_task(incoming, api, body, *each) for each in prompts]

    body, headers, asked, tasks = await read_prompt(service, request, api, model, read)
    told = await until_disconnected(request, _told(service, tasks))
    rows = iter([row for _, row in told])
    answers = [
        each.answer([next(rows) for _ in each.prompts], body.refuse_below or 0.0) for each in asked
    ]
    generations = [generation for generation, _ in told]
    shared: dict[str, Any] = {"model": service.state.resolve_model(body.model)}
    shared["usage"] = _usage(generations)
    if body.cache_report:
        reports = (cache_report_body(each.cache_report) for each in generations)
        shared["cache_report"] = [each for each in reports if each is not None] or None
    content = reply(answers, shared).model_dump_json()
    return Response(content, headers=dict(headers), media_type="application/json")


def _task(
    incoming: Incoming,
    api: str,
    body: QuestionsRequest,
    number: int,
    prompt: tuple[Conversation, tuple[int, ...]],
) -> Task:
    """Return the task of a prompt whose next tokens are told; there is no other attempt at it."""
    scope, params = incoming.key_scope(body), telling(prompt[1])
    parsed = ParsedRequest(prompt[0], params, ToolChoice("none", (), parallel=False))
    made = incoming.task(
        body,
        partial(parsed.prepare, incoming.service, scope),
        params,
        names={"messages": "input" if api == "decisions" else "state"},
        affinity=affinity_of(incoming.scope),
        number=number,
    )
    return replace(made, attempt=None)


def _usage(generations: Sequence[Generation]) -> dict[str, Any]:
    prompts = [generation.prompt for generation in generations]
    counts = usage_body(add_usage([generation.usage for generation in generations]), *prompts)
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": counts.prompt_tokens_details.model_dump(),
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt_tokens,
    }


async def _told(service: Service, tasks: Sequence[Task]) -> list[Told]:
    """Return the log-probabilities of each task's next token. If one task fails, all end.

    Tasks are submitted in their order, so that the first one leads the others, and as many are open
    as two steps take: a request with many questions leaves room in the queue for others.
    """
    seats, order = asyncio.Semaphore(2 * service.engine.config.max_num_seqs), asyncio.Lock()

    async def told(task: Task) -> Told:
        rows = list[Mapping[int, float]]()
        async with seats, AsyncExitStack() as stack:
            async with order:
                answer = answering(service, task, patient=True)
                generation = await stack.enter_async_context(answer)
            async for deltas in generation.deltas():
                rows += [row for delta in deltas for row in delta.logprobs]
        return generation, rows[0]

    running = [asyncio.ensure_future(told(task)) for task in tasks]
    try:
        return await asyncio.gather(*running)
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
