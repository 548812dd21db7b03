"""The routes of POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.items import read_past
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.answer import Incoming, ResponseSpec, answer_prompt
from vlm_serve.server.api.conversation import (
    ParsedRequest,
    conversation_task,
    count_tokens,
)
from vlm_serve.server.api.request_body import read_prompt
from vlm_serve.server.api.responses.new_turn import bytes_of_past, items_until, new_turn, parent_of
from vlm_serve.server.api.responses.references import with_references
from vlm_serve.server.api.responses.request import RESPONSES_UNIMPLEMENTED, ResponsesRequest
from vlm_serve.server.api.responses.stream import ResponseStream
from vlm_serve.server.api.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.http.tenants import owner_of
from vlm_serve.server.service import Service


class InputTokens(BaseModel):
    """The response body of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


async def count_input_tokens(service: Service, request: Request) -> Response:
    """Count the prompt tokens of a response request.

    Raises:
        VlmServeError: the request is invalid, or the server does not admit it.
    """

    def parse(
        body: ResponsesRequest, conversation: Conversation
    ) -> tuple[dict[str, str], ParsedRequest, str]:
        ignored = ignored_fields(body.model_extra or {}, RESPONSES_UNIMPLEMENTED)
        service.state.resolve_model(body.model)
        owner = owner_of(request.scope, body.cache_salt)
        parent = parent_of(service, owner, body.previous_response_id)
        read_past(items_until(parent), conversation)
        parsed = body.parsed(conversation, service.engine.preprocessor.template_traits)
        return ignored_header(ignored + parsed.conversation.ignored), parsed, owner.salt

    headers, parsed, salt = await read_prompt(
        service, request, "responses", ResponsesRequest, parse, *_past(service, request)
    )
    answer = InputTokens(input_tokens=await count_tokens(service, parsed, salt))
    return JSONResponse(answer.model_dump(), headers=headers)


async def create_response(service: Service, request: Request) -> Response:
    """Answer a conversation. It raises as `respond` does."""
    past = _past(service, request)
    return await answer_prompt(service, request, "responses", ResponsesRequest, _spec, *past)


def _past(service: Service, request: Request) -> tuple[partial[Any], partial[int]]:
    """Return what `read_prompt` adds of stored responses to a body, and how it counts them."""
    return (
        partial(with_references, service, request.scope),
        partial(bytes_of_past, service, request.scope),
    )


def _spec(incoming: Incoming, body: ResponsesRequest, conversation: Conversation) -> ResponseSpec:
    service = incoming.service
    ignored = ["store"] if body.store and service.state.responses is None else []
    ignored += ignored_fields(body.model_extra or {}, RESPONSES_UNIMPLEMENTED)
    turn = new_turn(service, incoming.scope, body)
    read_past(turn.past, conversation)
    parsed = body.parsed(conversation, service.engine.preprocessor.template_traits)
    ignored += parsed.conversation.ignored
    chat = conversation_task(incoming, body, parsed)

    def stream_of(generations: Sequence[Generation]) -> ResponseStream:
        return ResponseStream(body, chat, service.tokenizer, generations[0], turn)

    return ResponseSpec(
        [chat.task], stream_of, bool(body.stream), ignored_header(ignored), named=True
    )
