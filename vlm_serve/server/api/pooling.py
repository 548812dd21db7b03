"""POST /v1/embeddings (OpenAI's), /v1/rerank, /v1/score and /classify (vLLM's)."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.requests.pooling import ONE_TOKEN, Classifier, Vector, embedding_of, scoring
from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.identity.keys import KeyScope
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.preprocess.text.pooled_prompts import embedding_messages, rerank_messages
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.answers.generation import Generation, Task
from vlm_serve.server.api.shared.answer import AnswerStream, ResponseSpec, respond
from vlm_serve.server.api.shared.chat_request import ChatMessage
from vlm_serve.server.api.shared.conversation import ParsedRequest, prepare_tokens
from vlm_serve.server.api.shared.fields import (
    MAX_MESSAGES,
    AnswerRequest,
    CacheReportBody,
    Items,
    Optional,
    RequestModel,
    Table,
    Tokens,
    Whole,
    add_usage,
    cache_report_body,
)
from vlm_serve.server.api.shared.request_body import read_value
from vlm_serve.server.api.shared.sampling import ToolChoice
from vlm_serve.server.api.shared.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.http.body import validate
from vlm_serve.server.http.request_id import request_id_of, trace_context_of
from vlm_serve.server.http.streaming import Event
from vlm_serve.server.service import Preparation, Service

MAX_INPUTS = 1024

Work = Callable[[], Preparation]
ScoreOf = Callable[[Vector], float]
Make = Callable[[list[Vector], dict[str, Any]], BaseModel]
"""Makes a response of the vectors in the order of prompts, and of the fields that all share."""


class PoolingRequest(AnswerRequest):
    """The fields that all bodies share."""

    instruction: str | None = None
    use_activation: bool | None = None
    user: str | None = None
    mm_processor_kwargs: Table[Any] | None = None
    media_io_kwargs: Table[Any] | None = None
    truncate_prompt_tokens: Whole | None = None

    def work(self, service: Service, conversation: Conversation, scope: KeyScope) -> Work:
        """Return the work for the prompt of a conversation."""
        parsed = ParsedRequest(conversation, self.params, ToolChoice("none", (), parallel=False))
        return partial(parsed.prepare, service, scope)

    @property
    def params(self) -> SamplingParams:
        return replace(ONE_TOKEN, truncate_prompt_tokens=self.truncate_prompt_tokens)


class ClassifyRequest(PoolingRequest):
    input: str | Items[str] | Tokens | Items[Tokens] | None = None
    messages: Items[ChatMessage] | None = Field(None, max_length=MAX_MESSAGES)


class EmbeddingsRequest(ClassifyRequest):
    prompt_name: str | None = None
    input_type: str | None = None
    dimensions: Whole | None = None
    encoding_format: Literal["float", "base64"] | None = None


class PairContent(RequestModel):
    """A text, or parts of a message as in a chat."""

    content: str | Items[Table[Any]] | None = None
    text: str | None = None


PairSide = str | PairContent


class RerankRequest(PoolingRequest):
    query: PairSide | Items[Table[Any]]
    documents: Items[PairSide | Items[Table[Any]]]
    top_n: Whole | None = None
    return_documents: bool | None = None


class ScoreRequest(PoolingRequest):
    text_1: PairSide | Items[PairSide]
    text_2: PairSide | Items[PairSide]


def check_number(count: int, field: str) -> None:
    """Raise InvalidRequestError if a list is empty or too long."""
    if not count:
        raise InvalidRequestError(f"{field} must not be empty", param=field)
    if count > MAX_INPUTS:
        raise InvalidRequestError(f"{field} has {count} items, at most {MAX_INPUTS}", param=field)


def content_of(side: PairSide | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a text or the parts of one side of a pair."""
    return (side.content or side.text or "") if isinstance(side, PairContent) else side


def pairs_of(body: ScoreRequest) -> list[tuple[PairSide, PairSide]]:
    """Return the pairs of a score request: one to one, or one to many.

    Raises:
        InvalidRequestError: the lists do not fit each other.
    """
    first, second = (
        side if isinstance(side, list) else [side] for side in (body.text_1, body.text_2)
    )
    check_number(len(first), "text_1")
    check_number(len(second), "text_2")
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidRequestError(
            f"text_1 has {len(first)} items and text_2 has {len(second)}: give one for all, or as "
            "many",
            param="text_1",
        )
    return list(zip(first, second, strict=True))


class PoolingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    cached_tokens: int


class Pooled(BaseModel):
    """The fields that all bodies share. Reports are those of the prompts, in their order."""

    id: str
    model: str
    usage: PoolingUsage
    cache_report: Optional[list[CacheReportBody]] = None


class Embedding(BaseModel):
    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class Embeddings(Pooled):
    object: Literal["list"] = "list"
    data: list[Embedding]


class RerankResult(BaseModel):
    index: int
    relevance_score: float
    document: Optional[dict[str, Any]] = None


class Reranked(Pooled):
    results: list[RerankResult]


class Score(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(Pooled):
    object: Literal["list"] = "list"
    created: int
    data: list[Score]


class Label(BaseModel):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Labels(Pooled):
    object: Literal["list"] = "list"
    created: int
    data: list[Label]


def embedding_work(
    service: Service, body: ClassifyRequest, value: Mapping[str, Any], scope: KeyScope
) -> list[Work]:
    """Return the work for each input of a request for embeddings or labels.

    Args:
        service: what answers.
        body: the request.
        value: its JSON, from which messages are read.
        scope: whose prompts they are.

    Raises:
        InvalidRequestError: there is no input, or it is given twice.
    """
    if (body.input is None) == (body.messages is None):
        raise InvalidRequestError("give either input or messages", param="input")
    if body.messages is not None:
        return [body.work(service, read_conversation("chat", value), scope)]
    given = body.input
    assert given is not None
    inputs: Sequence[Any] = [given] if _is_one(given) else given
    check_number(len(inputs), "input")
    return [_of_input(service, body, prompt, scope) for prompt in inputs]


def _is_one(given: object) -> bool:
    """Return True for one text or one list of token ids."""
    return isinstance(given, str) or (
        isinstance(given, list) and bool(given) and isinstance(given[0], int)
    )


def _of_input(
    service: Service, body: PoolingRequest, given: str | list[int], scope: KeyScope
) -> Work:
    if not isinstance(given, str) or not isinstance(body, EmbeddingsRequest):
        kept = body.params.kept_prompt_tokens(service.engine.max_model_len)
        return partial(prepare_tokens, service, given, scope, kept)
    sentences, name = service.engine.preprocessor.sentences, body.prompt_name or body.input_type
    conversation = _conversation(body, embedding_messages(given, body.instruction, sentences, name))
    return body.work(service, conversation, scope)


def pair_work(
    service: Service, body: PoolingRequest, query: Any, document: Any, scope: KeyScope
) -> Work:
    """Return the work for the prompt that judges a pair; it raises as `read_conversation`."""
    plain, asked = not service.engine.preprocessor.takes_media, content_of(query)
    messages = rerank_messages(asked, content_of(document), body.instruction, plain=plain)
    return body.work(service, _conversation(body, messages), scope)


def _conversation(body: PoolingRequest, messages: list[dict[str, Any]]) -> Conversation:
    options = {
        "mm_processor_kwargs": body.mm_processor_kwargs,
        "media_io_kwargs": body.media_io_kwargs,
    }
    return read_conversation("chat", {"messages": messages, **options})


@dataclass
class PooledAnswer(AnswerStream):
    """The answer to a pooling request, which is never a stream.

    Attributes:
        generations: one per prompt.
        response_id, model: of the response.
        reports: whether it has the prompts' cache reports.
    """

    generations: Sequence[Generation]
    make: Make
    response_id: str
    model: str
    reports: bool
    _vectors: dict[int, Vector] = field(default_factory=dict)

    def push(self, prompt: int, deltas: Sequence[Delta]) -> list[Event]:
        for delta in deltas:
            if delta.vector is not None:
                self._vectors[prompt] = delta.vector
        return []

    def result(self) -> BaseModel:
        usage = add_usage([generation.usage for generation in self.generations])
        shared: dict[str, Any] = {
            "id": self.response_id,
            "model": self.model,
            "usage": PoolingUsage(
                prompt_tokens=usage.prompt_tokens,
                total_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
            ),
        }
        if self.reports:
            reports = [
                cache_report_body(generation.cache_report) for generation in self.generations
            ]
            shared["cache_report"] = [report for report in reports if report is not None]
        return self.make([vector for _, vector in sorted(self._vectors.items())], shared)


def embeddings_body(
    body: EmbeddingsRequest, normalised: bool, vectors: list[Vector], shared: dict[str, Any]
) -> Embeddings:
    """Return the embeddings of vectors, as numbers or as base64 of little-endian float32."""
    normalised = normalised if body.use_activation is None else body.use_activation
    resized = [embedding_of(each, body.dimensions, unit=normalised) for each in vectors]
    coded: list[list[float] | str] = [
        base64.b64encode(vector.astype("<f4").tobytes()).decode()
        if body.encoding_format == "base64"
        else vector.tolist()
        for vector in resized
    ]
    data = [Embedding(index=index, embedding=content) for index, content in enumerate(coded)]
    return Embeddings(data=data, **shared)


def rerank_body(
    score: ScoreOf, body: RerankRequest, vectors: list[Vector], shared: dict[str, Any]
) -> Reranked:
    """Return the documents' scores, the best first."""
    results = [
        RerankResult(
            index=index,
            relevance_score=score(vector),
            document=_shown(body, index) if body.return_documents else None,
        )
        for index, vector in enumerate(vectors)
    ]
    results.sort(key=lambda result: -result.relevance_score)
    return Reranked(results=results[: body.top_n], **shared)


def _shown(body: RerankRequest, index: int) -> dict[str, Any]:
    content = content_of(body.documents[index])
    return {"text": content} if isinstance(content, str) else {"content": content}


def scores_body(score: ScoreOf, vectors: list[Vector], shared: dict[str, Any]) -> Scores:
    """Return the scores of pairs, in their order."""
    data = [Score(index=index, score=score(vector)) for index, vector in enumerate(vectors)]
    return Scores(data=data, created=int(time.time()), **shared)


def labels_body(
    head: Classifier, body: ClassifyRequest, vectors: list[Vector], shared: dict[str, Any]
) -> Labels:
    """Return the values of all labels of each prompt, and the name of the best one."""
    activated = body.use_activation is not False
    rows = [head.values(vector, activated=activated) for vector in vectors]
    data = [
        Label(index=index, label=head.labels[row.index(max(row))], probs=row, num_classes=len(row))
        for index, row in enumerate(rows)
    ]
    return Labels(data=data, created=int(time.time()), **shared)


B = TypeVar("B", bound=PoolingRequest)


async def embeddings(service: Service, request: Request) -> Response:
    """Embed texts, token ids or a conversation. It raises as `respond` does."""

    def parsed(body: EmbeddingsRequest, value: Any, scope: KeyScope) -> tuple[Sequence[Work], Make]:
        size = service.engine.spec.hidden_size
        if body.dimensions is not None and not 1 <= body.dimensions <= size:
            raise InvalidRequestError(f"dimensions must be 1 to {size}", param="dimensions")
        work = embedding_work(service, body, value, scope)
        return work, partial(embeddings_body, body, service.engine.preprocessor.normalised)

    return await _answer(service, request, "embed", EmbeddingsRequest, parsed)


async def rerank(service: Service, request: Request) -> Response:
    """Sort documents by how well they meet a query. It raises as `respond` does."""

    def parsed(body: RerankRequest, value: Any, scope: KeyScope) -> tuple[Sequence[Work], Make]:
        check_number(len(body.documents), "documents")
        if body.top_n is not None and body.top_n < 1:
            raise InvalidRequestError("top_n must be at least 1", param="top_n")
        work = [
            pair_work(service, body, body.query, document, scope) for document in body.documents
        ]
        return work, partial(rerank_body, scoring(service.engine.spec, body.use_activation), body)

    return await _answer(service, request, "rerank", RerankRequest, parsed)


async def score(service: Service, request: Request) -> Response:
    """Score pairs. It raises as `respond` does."""

    def parsed(body: ScoreRequest, value: Any, scope: KeyScope) -> tuple[Sequence[Work], Make]:
        work = [pair_work(service, body, *pair, scope) for pair in pairs_of(body)]
        return work, partial(scores_body, scoring(service.engine.spec, body.use_activation))

    return await _answer(service, request, "rerank", ScoreRequest, parsed)


async def classify(service: Service, request: Request) -> Response:
    """Label texts and token ids as they are, or a conversation. It raises as `respond` does."""

    def parsed(body: ClassifyRequest, value: Any, scope: KeyScope) -> tuple[Sequence[Work], Make]:
        head = service.engine.spec.classifier
        assert head is not None, "the task says so"
        value = {"add_generation_prompt": False} | value
        work = embedding_work(service, body, value, scope)
        return work, partial(labels_body, head, body)

    return await _answer(service, request, "classify", ClassifyRequest, parsed)


def _unpadded(service: Service, scope: KeyScope, pad: int, work: Work) -> Preparation:
    """Return a prompt up to its last token that is no padding, which transformers pools."""
    prompt = work()
    if not isinstance(prompt, Prompt) or prompt.spans or prompt.token_ids[-1] != pad:
        return prompt
    ids = list(prompt.token_ids)
    end = next((end for end in range(len(ids), 1, -1) if ids[end - 1] != pad), 1)
    return prepare_tokens(service, ids[:end], scope)


async def _answer(
    service: Service,
    request: Request,
    task: str,
    model: type[B],
    parsed: Callable[[B, Any, KeyScope], tuple[Sequence[Work], Make]],
) -> Response:
    arrival, served = time.monotonic(), service.engine.config.task
    head = service.engine.spec.classifier if served == "classify" else None
    if served != task and (head is None or task != "rerank"):
        raise InvalidRequestError(
            f"this route needs a server that was started with --task {task}, and this one has "
            f"--task {served}"
        )

    def read(value: Any) -> ResponseSpec:
        body, scope = validate(value, model), request.scope
        if body.stream:
            raise InvalidRequestError("stream is not possible here", param="stream")
        key_scope = service.state.key_scope(scope, body.model, body.cache_salt)
        works, make = parsed(body, value, key_scope)
        if head is not None and head.pad is not None:
            works = [partial(_unpadded, service, key_scope, head.pad, work) for work in works]
        request_id = body.request_id or request_id_of(scope)
        name = service.state.resolve_model(body.model)
        tasks = [
            Task(
                work,
                ONE_TOKEN,
                request_id,
                arrival,
                body.priority or 0,
                trace=trace_context_of(scope),
                number=number,
                pooled=True,
            )
            for number, work in enumerate(works)
        ]

        def answer(generations: Sequence[Generation]) -> PooledAnswer:
            reports = bool(body.cache_report)
            return PooledAnswer(generations, make, f"pool-{request_id}", name, reports)

        return ResponseSpec(
            tasks, answer, False, ignored_header(ignored_fields(body.model_extra or {}))
        )

    return await respond(service, request, await read_value(service, request, read))
