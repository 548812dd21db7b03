"""The route of POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from fastapi import Request
from starlette.responses import Response
from starlette.types import Scope

from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.server.answers.generation import Generation, Task
from vlm_serve.server.api.answer import ResponseSpec, respond
from vlm_serve.server.api.completions.request import CompletionRequest, checked_prompts
from vlm_serve.server.api.completions.stream import CompletionStream
from vlm_serve.server.api.prompts import prepare_tokens
from vlm_serve.server.api.request_affinity import affinity_of
from vlm_serve.server.api.request_body import read_prompt
from vlm_serve.server.api.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.failover.attempt import attempt_of, created_of
from vlm_serve.server.http.request_id import request_id_of, trace_context_of
from vlm_serve.server.http.tenants import share_of
from vlm_serve.server.service import Service


async def completions(service: Service, request: Request) -> Response:
    """Continue one or several prompts. It raises as `respond` does."""
    make_spec = partial(_spec, service, request.scope, time.monotonic())
    return await respond(
        service,
        request,
        await read_prompt(service, request, "completions", CompletionRequest, make_spec),
    )


def _spec(
    service: Service,
    scope: Scope,
    arrival: float,
    body: CompletionRequest,
    conversation: Conversation,
) -> ResponseSpec:
    headers = ignored_header(ignored_fields(body.model_extra or {}))
    params = body.sampling_params()
    request_id = body.request_id or request_id_of(scope)
    own = service.state.key_scope(scope, body)
    model, created = service.state.resolve_model(body.model), created_of(scope)
    names = {"messages": "prompt", "structured_outputs": body.form_field}

    def stream_of(generations: Sequence[Generation]) -> CompletionStream:
        return CompletionStream(
            body,
            service.tokenizer,
            generations,
            response_id=f"cmpl-{request_id}",
            model=model,
            created=created,
        )

    kept = params.kept_prompt_tokens(service.engine.max_model_len)
    prompts: Iterable[tuple[int, str | list[int]]] = enumerate(checked_prompts(conversation))
    tasks = [
        Task(
            partial(prepare_tokens, service, prompt, own, kept),
            params,
            request_id,
            arrival,
            body.priority or 0,
            trace=trace_context_of(scope),
            names=names,
            attempt=attempt_of(scope),
            number=number,
            share=share_of(scope),
        )
        for number, prompt in prompts
    ]
    tasks[0] = replace(tasks[0], affinity=affinity_of(scope))
    return ResponseSpec(tasks, stream_of, bool(body.stream), headers)
