"""POST /v1/decisions (OpenAI's) and /v1/systemone (that of `transformers serve`): typed questions
about one input, answered with probabilities.

Each question is a prompt behind the input, which is computed once for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
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
    Table,
    add_usage,
    cache_report_body,
)
from vlm_serve.server.api.shared.request_body import affinity_of, read_prompt
from vlm_serve.server.api.shared.sampling import ToolChoice
from vlm_serve.server.api.shared.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.http.streaming import until_disconnected
from vlm_serve.server.service import Service


class QuestionsRequest(AnswerRequest):
    """The fields that both bodies share."""

    refuse_below: float | None = None
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


class Named(BaseModel):
    name: str | None


class Refusal(Named):
    type: Literal["refusal"] = "refusal"


class Predicate(Named):
    type: Literal["predicate"] = "predicate"
    probability: float


class ChoiceProbability(BaseModel):
    value: str | bool
    probability: float


class Choice(Named):
    type: Literal["choice"] = "choice"
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class LevelProbability(BaseModel):
    value: int
    label: str
    probability: float


class Score(Named):
    type: Literal["score"] = "score"
    score: float
    confidence: float
    probabilities: list[LevelProbability]


class CachedTokens(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokens(BaseModel):
    reasoning_tokens: int = 0


class DecisionUsage(BaseModel):
    """The tokens of all prompts. The input counts for each, with its reuse in `cached_tokens`."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int = 0
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: int


class Judged(BaseModel):
    """The fields that both answers share. Reports are those of the prompts, in their order."""

    model: str
    usage: DecisionUsage
    cache_report: Optional[list[CacheReportBody]] = None


class Decision(Judged):
    answers: list[Predicate | Choice | Score | Refusal]


class SystemOne(Judged):
    answers: dict[str, dict[str, Any]]


async def decisions(service: Service, request: Request) -> Response:
    """Answer questions about an input. It raises as `_answer` does."""

    def questions_of(body: DecisionsRequest) -> list[Question]:
        return read_questions(body.questions)

    def made(answers: list[Answer], shared: dict[str, Any]) -> Decision:
        return Decision(answers=list(map(_decided, answers)), **shared)

    return await _answer(service, request, "decisions", DecisionsRequest, questions_of, made)


async def systemone(service: Service, request: Request) -> Response:
    """Answer named questions about a state. It raises as `_answer` does."""

    def questions_of(body: SystemOneRequest) -> list[Question]:
        return read_system_one(body.questions, assets_of({"assets": body.assets}))

    def made(answers: list[Answer], shared: dict[str, Any]) -> SystemOne:
        return SystemOne(answers={str(each.name): _judged(each) for each in answers}, **shared)

    return await _answer(service, request, "systemone", SystemOneRequest, questions_of, made)


def _decided(answer: Answer) -> Predicate | Choice | Score | Refusal:
    """Return an answer in the form of `openai.types.Decision`."""
    pairs = list(zip(answer.question.options, answer.probabilities, strict=True))
    if answer.refused:
        return Refusal(name=answer.name)
    if answer.question.kind == "predicate":
        return Predicate(name=answer.name, probability=answer.probability)
    if answer.question.kind == "choice":
        return Choice(
            name=answer.name,
            choice=answer.choice,
            confidence=answer.confidence,
            probabilities=[
                ChoiceProbability(value=option.value, probability=each) for option, each in pairs
            ],
        )
    levels = [
        LevelProbability(value=at, label=option.value, probability=each)
        for at, (option, each) in enumerate(pairs)
    ]
    return Score(
        name=answer.name, score=answer.score, confidence=answer.confidence, probabilities=levels
    )


def _judged(answer: Answer) -> dict[str, Any]:
    """Return an answer in the form of System One."""
    question = answer.question
    if answer.refused:
        return {"type": "refusal"}
    if question.kind == "predicate":
        return {"type": "noul", "noul": answer.probability}
    names = [option.name for option in question.options]
    rest = {
        "confidence": answer.confidence,
        "probabilities": dict(zip(names, answer.probabilities, strict=True)),
    }
    if question.kind == "choice":
        return {"type": "choice", "choice": answer.choice, **rest}
    legend = {option.name: option.value for option in question.options}
    return {"type": "score", "score": answer.score, "legend": legend, **rest}


B = TypeVar("B", bound=QuestionsRequest)
Reply = Callable[[list[Answer], dict[str, Any]], BaseModel]
"""Makes a response of the answers and of the fields that both responses share."""
Told = tuple[Generation, Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class _Spec:
    """How to respond to a validated request.

    Attributes:
        tasks: one for each prompt of the questions, in their order.
        model: its name in the response.
        reports: whether the response has the prompts' cache reports.
    """

    asked: Sequence[Asked]
    tasks: Sequence[Task]
    model: str
    refuse_below: float
    reports: bool
    headers: Mapping[str, str]

    def body(self, told: Sequence[Told], reply: Reply) -> BaseModel:
        """Return the response for what each task has told."""
        rows = iter([row for _, row in told])
        answers = [
            asked.answer([next(rows) for _ in asked.prompts], self.refuse_below)
            for asked in self.asked
        ]
        usage = add_usage([generation.usage for generation, _ in told])
        cached = CachedTokens(
            cached_tokens=usage.cached_tokens, cache_write_tokens=usage.written_tokens
        )
        counted = DecisionUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=cached,
            total_tokens=usage.prompt_tokens,
        )
        shared: dict[str, Any] = {"model": self.model, "usage": counted}
        if self.reports:
            reports = [cache_report_body(generation.cache_report) for generation, _ in told]
            shared["cache_report"] = [report for report in reports if report is not None]
        return reply(answers, shared)


async def _answer(
    service: Service,
    request: Request,
    api: str,
    model: type[B],
    questions_of: Callable[[B], list[Question]],
    reply: Reply,
) -> Response:
    """Answer the questions of a request, which has no stream.

    Raises:
        VlmServeError: see `read_prompt` and `answering`.
        ClientGoneError: the client disconnected.
    """
    incoming = Incoming(service, request.scope, monotonic())
    use = partial(_spec, incoming, api, questions_of)
    spec = await read_prompt(service, request, api, model, use)
    told = await until_disconnected(request, _told(service, spec.tasks))
    body = spec.body(told, reply).model_dump_json()
    return Response(body, headers=dict(spec.headers), media_type="application/json")


def _spec(
    incoming: Incoming,
    api: str,
    questions_of: Callable[[B], list[Question]],
    body: B,
    about: Conversation,
) -> _Spec:
    if body.stream:
        raise InvalidRequestError("stream is not possible here", param="stream")
    refuse_below = body.refuse_below or 0.0
    check_mass(refuse_below)
    service, ignored = incoming.service, ignored_fields(body.model_extra or {})
    preprocessor, scope = service.engine.preprocessor, incoming.key_scope(body)
    asked = ask(about, questions_of(body), preprocessor.tokenizer, preprocessor.template_traits)
    names = {"messages": "input" if api == "decisions" else "state"}

    def task(number: int, conversation: Conversation, tokens: tuple[int, ...]) -> Task:
        parsed = ParsedRequest(conversation, telling(tokens), ToolChoice("none", (), False))
        prepare = partial(parsed.prepare, service, scope)
        affinity = affinity_of(incoming.scope)
        made = incoming.task(
            body, prepare, parsed.params, names=names, affinity=affinity, number=number
        )
        return replace(made, attempt=None)

    prompts = [prompt for each in asked for prompt in each.prompts]
    return _Spec(
        asked,
        [task(number, *prompt) for number, prompt in enumerate(prompts)],
        service.state.resolve_model(body.model),
        refuse_below,
        bool(body.cache_report),
        ignored_header(ignored, about.ignored),
    )


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
