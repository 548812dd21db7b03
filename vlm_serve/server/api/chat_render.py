"""POST /v1/chat/completions/render: the request for tokens that a chat request amounts to."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.api.chat import chat_task
from vlm_serve.server.api.generate import TokenSampling
from vlm_serve.server.api.shared.answer import Incoming
from vlm_serve.server.api.shared.chat_request import ChatCompletionRequest
from vlm_serve.server.api.shared.conversation import ConversationTask
from vlm_serve.server.api.shared.fields import Optional
from vlm_serve.server.api.shared.request_body import read_prompt
from vlm_serve.server.http.errors import renamed_params
from vlm_serve.server.service import Service


class Placeholder(BaseModel):
    offset: int
    length: int


class RenderedMedia(BaseModel):
    """The media of a prompt, by modality: their hashes and the places of their tokens."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[Placeholder]]


class Rendered(BaseModel):
    """The response body: a body of POST /inference/v1/generate."""

    request_id: str
    token_ids: list[int]
    features: Optional[RenderedMedia] = None
    sampling_params: dict[str, Any]
    model: str
    stream: Literal[False] = False
    cache_salt: Optional[str] = None
    priority: int = 0


async def render_chat(service: Service, request: Request) -> Response:
    """Prepare the prompt of a chat request, and answer with its tokens instead of running it.

    Raises:
        VlmServeError: the request is invalid, or the server does not admit it.
    """
    make = partial(_chat, Incoming(service, request.scope, time.monotonic()))
    body, chat, headers = await read_prompt(service, request, "chat", ChatCompletionRequest, make)
    with service.admission.admitted(chat.task.tenant), renamed_params(chat.task.names):
        prompt = await service.prepare(chat.task.prepare)
    answer = partial(_rendered, body, chat, prompt, headers)
    return await service.workers.prepare(answer)


def _chat(
    incoming: Incoming, body: ChatCompletionRequest, conversation: Conversation
) -> tuple[ChatCompletionRequest, ConversationTask, Mapping[str, str]]:
    return body, *chat_task(incoming, body, conversation)


def _rendered(
    body: ChatCompletionRequest, chat: ConversationTask, prompt: Prompt, headers: Mapping[str, str]
) -> Response:
    rendered = Rendered(
        request_id=chat.task.request_id,
        token_ids=list(prompt.token_ids),
        features=_media(prompt),
        sampling_params=sampling_body(chat.task.params),
        model=chat.model,
        cache_salt=body.cache_salt,
        priority=chat.task.priority,
    )
    return JSONResponse(rendered.model_dump(exclude_none=True), headers=headers)


def sampling_body(params: SamplingParams) -> dict[str, Any]:
    """Return `sampling_params` of a request for tokens: the fields that are set."""
    options: dict[str, Any] = {}
    for option in dataclasses.fields(params):
        value = getattr(params, option.name)
        if option.name in TokenSampling.model_fields and value != option.default:
            options[option.name] = list(value) if isinstance(value, tuple) else value
    form = params.structured_outputs
    if form is not None:
        given = {kind.name: getattr(form, kind.name) for kind in dataclasses.fields(form)}
        given.pop("strict")
        options["structured_outputs"] = {k: v for k, v in given.items() if v not in (None, False)}
    return options


def _media(prompt: Prompt) -> RenderedMedia | None:
    if not prompt.spans:
        return None
    media = RenderedMedia(mm_hashes={}, mm_placeholders={})
    for span in prompt.spans:
        place = Placeholder(offset=span.start, length=span.end - span.start)
        media.mm_hashes.setdefault(span.modality, []).append(span.content_hash.hex())
        media.mm_placeholders.setdefault(span.modality, []).append(place)
    return media
