"""The routes of POST /v1/embeddings, /v1/rerank and /v1/score."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Scope

from vlm_serve.engine.pooling import ONE_TOKEN, Vector
from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.keys import KeyScope
from vlm_serve.server.answers.generation import Task
from vlm_serve.server.api.answer import ResponseSpec, respond
from vlm_serve.server.api.pooling.answers import (
    PooledAnswer,
    embeddings_body,
    rerank_body,
    scores_body,
)
from vlm_serve.server.api.pooling.prompts import Work, embedding_work, pair_work
from vlm_serve.server.api.pooling.request import (
    EmbeddingsRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    check_number,
    pairs_of,
)
from vlm_serve.server.api.request_body import read_value
from vlm_serve.server.api.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.http.json_body import validate
from vlm_serve.server.http.request_id import request_id_of, trace_context_of
from vlm_serve.server.service import Service

B = TypeVar("B", bound=PoolingRequest)


async def embeddings(service: Service, request: Request) -> Response:
    """Embed texts, token ids or a conversation. It raises as `respond` does."""

    def parsed(body: EmbeddingsRequest, value: Any, own: KeyScope) -> _Parsed:
        size = service.engine.spec.hidden_size
        if body.dimensions is not None and not 1 <= body.dimensions <= size:
            raise InvalidRequestError(f"dimensions must be 1 to {size}", param="dimensions")
        work = embedding_work(service, body, value, own)
        return _Parsed(work, partial(embeddings_body, body))

    return await _answer(service, request, "embed", EmbeddingsRequest, parsed)


async def rerank(service: Service, request: Request) -> Response:
    """Sort documents by how well they meet a query. It raises as `respond` does."""

    def parsed(body: RerankRequest, value: Any, own: KeyScope) -> _Parsed:
        check_number(len(body.documents), "documents")
        if body.top_n is not None and body.top_n < 1:
            raise InvalidRequestError("top_n must be at least 1", param="top_n")
        work = [pair_work(service, body, body.query, each, own) for each in body.documents]
        return _Parsed(work, partial(rerank_body, body))

    return await _answer(service, request, "rerank", RerankRequest, parsed)


async def score(service: Service, request: Request) -> Response:
    """Score pairs. It raises as `respond` does."""

    def parsed(body: ScoreRequest, value: Any, own: KeyScope) -> _Parsed:
        work = [pair_work(service, body, *pair, own) for pair in pairs_of(body)]
        return _Parsed(work, scores_body)

    return await _answer(service, request, "rerank", ScoreRequest, parsed)


@dataclass(frozen=True)
class _Parsed:
    """The work for each prompt, and what makes the body of their vectors."""

    work: Sequence[Work]
    make: Callable[[list[Vector], dict[str, Any]], BaseModel]


async def _answer(
    service: Service,
    request: Request,
    task: str,
    model: type[B],
    parsed: Callable[[B, Any, KeyScope], _Parsed],
) -> Response:
    arrival, made = time.monotonic(), service.engine.config.task
    if made != task:
        raise InvalidRequestError(
            f"this route needs a server that was started with --task {task}, and this one has "
            f"--task {made}"
        )

    def read(value: Any) -> ResponseSpec:
        body = validate(value, model)
        if body.stream:
            raise InvalidRequestError("stream is not possible here", param="stream")
        own = service.state.key_scope(request.scope, body)
        return _spec(service, request.scope, arrival, body, parsed(body, value, own))

    return await respond(service, request, await read_value(service, request, read))


def _spec(
    service: Service, scope: Scope, arrival: float, body: PoolingRequest, parsed: _Parsed
) -> ResponseSpec:
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
        for number, work in enumerate(parsed.work)
    ]
    return ResponseSpec(
        tasks,
        lambda generations: PooledAnswer(
            generations, parsed.make, f"pool-{request_id}", name, bool(body.cache_report)
        ),
        False,
        ignored_header(ignored_fields(body.model_extra or {})),
    )
