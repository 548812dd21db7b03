"""The route: from a request to the job that answers it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Scope

from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.answer import Job, respond
from vlm_serve.server.api.conversation import (
    Asked,
    conversation_task,
    count_tokens,
    unheard,
)
from vlm_serve.server.api.responses.request import RESPONSES_UNIMPLEMENTED, ResponsesRequest
from vlm_serve.server.api.responses.stream import ResponseStream
from vlm_serve.server.api.responses.turns import items_until, new_turn, parent_of
from vlm_serve.server.api.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.http.body import read_request
from vlm_serve.server.http.tenants import owner_of
from vlm_serve.server.service import Service


class InputTokens(BaseModel):
    """The answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


async def count_input_tokens(service: Service, request: Request) -> Response:
    """Says how long the prompt of a response request is. Raises VlmServeError."""

    def asked_of(body: ResponsesRequest) -> tuple[dict[str, str], Asked, str]:
        ignored = ignored_fields(body.model_extra or {}, RESPONSES_UNIMPLEMENTED)
        service.resolve_model(body.model)
        owner = owner_of(request.scope, body.cache_salt)
        parent = parent_of(service, owner, body.previous_response_id)
        return ignored_header(ignored), body.asked(items_until(parent)), owner.salt

    headers, asked, salt = await read_request(service, request, ResponsesRequest, asked_of)
    answer = InputTokens(input_tokens=await count_tokens(service, asked, salt))
    return JSONResponse(answer.model_dump(), headers=headers)


async def create_response(service: Service, request: Request) -> Response:
    """Answers one conversation. Raises as `respond`."""
    job = partial(_job, service, request.scope, time.monotonic())
    return await respond(
        service, request, await read_request(service, request, ResponsesRequest, job)
    )


def _job(service: Service, scope: Scope, arrival: float, body: ResponsesRequest) -> Job:
    ignored = ["store"] if body.store and service.responses is None else []
    ignored += ignored_fields(body.model_extra or {}, RESPONSES_UNIMPLEMENTED)
    ignored += ["text.verbosity"] * unheard(service, "verbosity", body.verbosity)
    turn = new_turn(service, scope, body)
    chat = conversation_task(service, scope, body, body.asked(turn.past), arrival)

    def stream_of(generations: Sequence[Generation]) -> ResponseStream:
        return ResponseStream(body, chat, service.tokenizer, generations[0], turn)

    return Job([chat.task], stream_of, bool(body.stream), ignored_header(ignored), named=True)
