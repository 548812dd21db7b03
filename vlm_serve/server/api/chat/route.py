"""The route of POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from fastapi import Request
from starlette.responses import Response
from starlette.types import Scope

from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.answer import ResponseSpec, respond
from vlm_serve.server.api.chat.request import ChatCompletionRequest
from vlm_serve.server.api.chat.stream import ChatStream
from vlm_serve.server.api.conversation import conversation_task
from vlm_serve.server.api.request_body import read_prompt
from vlm_serve.server.api.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.service import Service


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer a conversation. It raises as `respond` does."""
    make_spec = partial(_spec, service, request.scope, time.monotonic())
    return await respond(
        service,
        request,
        await read_prompt(service, request, "chat", ChatCompletionRequest, make_spec),
    )


def _spec(
    service: Service,
    scope: Scope,
    arrival: float,
    body: ChatCompletionRequest,
    conversation: Conversation,
) -> ResponseSpec:
    ignored = ignored_fields(body.model_extra or {})
    parsed = body.parsed(conversation, service.engine.preprocessor.template_traits)
    ignored += parsed.conversation.ignored
    chat = conversation_task(service, scope, body, parsed, arrival)

    def stream_of(generations: Sequence[Generation]) -> ChatStream:
        return ChatStream(body, chat, service.tokenizer, generations[0])

    return ResponseSpec([chat.task], stream_of, bool(body.stream), ignored_header(ignored))
