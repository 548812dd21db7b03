"""The routes of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.answer import Incoming, ResponseSpec, answer_prompt
from vlm_serve.server.api.conversation import (
    ParsedRequest,
    conversation_task,
    count_tokens,
)
from vlm_serve.server.api.messages.request import (
    MESSAGES_UNIMPLEMENTED,
    MessagesPrompt,
    MessagesRequest,
)
from vlm_serve.server.api.messages.stream import MessageStream
from vlm_serve.server.api.request_body import read_prompt
from vlm_serve.server.api.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.http.tenants import salt_of
from vlm_serve.server.service import Service


class CountedTokens(BaseModel):
    """The response body of /v1/messages/count_tokens."""

    input_tokens: int


async def count_message_tokens(service: Service, request: Request) -> Response:
    """Count the prompt tokens of a message request.

    Raises:
        VlmServeError: the request is invalid, or the server does not admit it.
    """

    def parse(
        body: MessagesPrompt, conversation: Conversation
    ) -> tuple[dict[str, str], ParsedRequest, str]:
        service.state.resolve_model(body.model)
        salt = salt_of(request.scope, body.cache_salt)
        return *_parsed(service, body, conversation), salt

    headers, parsed, salt = await read_prompt(service, request, "messages", MessagesPrompt, parse)
    answer = CountedTokens(input_tokens=await count_tokens(service, parsed, salt))
    return JSONResponse(answer.model_dump(), headers=headers)


def _parsed(
    service: Service, body: MessagesPrompt, conversation: Conversation
) -> tuple[dict[str, str], ParsedRequest]:
    """Return the parsed request, after the headers that name what is ignored."""
    ignored = ignored_fields(body.model_extra or {}, MESSAGES_UNIMPLEMENTED)
    parsed = body.parsed(conversation, service.engine.preprocessor.template_traits)
    return ignored_header(ignored + parsed.conversation.ignored), parsed


async def create_message(service: Service, request: Request) -> Response:
    """Answer a conversation. It raises as `respond` does."""
    return await answer_prompt(service, request, "messages", MessagesRequest, _spec)


def _spec(incoming: Incoming, body: MessagesRequest, conversation: Conversation) -> ResponseSpec:
    headers, parsed = _parsed(incoming.service, body, conversation)
    chat = conversation_task(incoming, body, parsed)

    def stream_of(generations: Sequence[Generation]) -> MessageStream:
        return MessageStream(body, chat, generations[0])

    return ResponseSpec([chat.task], stream_of, bool(body.stream), headers, named=True)
