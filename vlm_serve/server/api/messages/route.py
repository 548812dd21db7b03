"""The route: from a request to the job that answers it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import Request
from starlette.responses import Response

from vlm_serve.server.api.answer import Job, respond
from vlm_serve.server.api.conversation import conversation_task
from vlm_serve.server.api.messages.request import MESSAGES_UNIMPLEMENTED, MessagesRequest
from vlm_serve.server.api.messages.stream import MessageStream
from vlm_serve.server.api.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.body import read_json
from vlm_serve.server.generation import Generation
from vlm_serve.server.service import Service


async def create_message(service: Service, request: Request) -> Response:
    """Answers one conversation. Raises as `respond`."""
    arrival = time.monotonic()
    body = await read_json(request, MessagesRequest, service.config.max_body_bytes)
    headers = ignored_header(ignored_fields(body.model_extra or {}, MESSAGES_UNIMPLEMENTED))
    chat = conversation_task(service, request.scope, body, body.asked(), arrival)

    def stream_of(generations: Sequence[Generation]) -> MessageStream:
        return MessageStream(body, chat, generations[0])

    job = Job([chat.task], stream_of, bool(body.stream), headers, named=True)
    return await respond(service, request, job)
