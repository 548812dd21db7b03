"""The route of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request
from starlette.responses import Response

from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.answer import Incoming, ResponseSpec, answer_prompt
from vlm_serve.server.api.chat.request import ChatCompletionRequest
from vlm_serve.server.api.chat.stream import ChatStream
from vlm_serve.server.api.conversation import ConversationTask, conversation_task
from vlm_serve.server.api.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.service import Service


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer a conversation. It raises as `respond` does."""
    return await answer_prompt(service, request, "chat", ChatCompletionRequest, _spec)


def chat_task(
    incoming: Incoming, body: ChatCompletionRequest, conversation: Conversation
) -> tuple[ConversationTask, dict[str, str]]:
    """Return how to answer a chat request, and the header that names what is ignored.

    Raises:
        VlmServeError: the request is invalid.
    """
    ignored = ignored_fields(body.model_extra or {})
    parsed = body.parsed(conversation, incoming.service.engine.preprocessor.template_traits)
    chat = conversation_task(incoming, body, parsed)
    return chat, ignored_header(ignored + parsed.conversation.ignored)


def _spec(
    incoming: Incoming, body: ChatCompletionRequest, conversation: Conversation
) -> ResponseSpec:
    chat, headers = chat_task(incoming, body, conversation)

    def stream_of(generations: Sequence[Generation]) -> ChatStream:
        return ChatStream(body, chat, incoming.service.tokenizer, generations[0])

    return ResponseSpec([chat.task], stream_of, bool(body.stream), headers)
