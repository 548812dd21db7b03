"""The route of POST /inference/v1/generate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from fastapi import Request
from starlette.responses import Response
from starlette.types import Scope

from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.server.answers.generation import Generation, Task
from vlm_serve.server.api.answer import ResponseSpec, respond
from vlm_serve.server.api.generate.request import (
    GENERATE_REFUSED,
    SAMPLING_UNIMPLEMENTED,
    GenerateRequest,
)
from vlm_serve.server.api.generate.stream import GenerateStream
from vlm_serve.server.api.prompts import prepare_tokens
from vlm_serve.server.api.request_affinity import affinity_of
from vlm_serve.server.api.request_body import read_prompt
from vlm_serve.server.api.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.failover.attempt import attempt_of, created_of
from vlm_serve.server.http.errors import renamed_params
from vlm_serve.server.http.request_id import request_id_of, trace_context_of
from vlm_serve.server.http.tenants import share_of
from vlm_serve.server.service import Service


async def generate(service: Service, request: Request) -> Response:
    """Continue a prompt of token ids. It raises as `respond` does."""
    make_spec = partial(_spec, service, request.scope, time.monotonic())
    return await respond(
        service,
        request,
        await read_prompt(service, request, "generate", GenerateRequest, make_spec),
    )


def _spec(
    service: Service, scope: Scope, arrival: float, body: GenerateRequest, _: Conversation
) -> ResponseSpec:
    headers = ignored_header(_ignored(body))
    own = service.state.key_scope(scope, body)
    model, created = service.state.resolve_model(body.model), created_of(scope)

    def stream_of(generations: Sequence[Generation]) -> GenerateStream:
        return GenerateStream(body, service.tokenizer, generations[0], model=model, created=created)

    params = body.params()
    kept = params.kept_prompt_tokens(service.engine.max_model_len)
    task = Task(
        partial(prepare_tokens, service, body.token_ids, own, kept),
        params,
        body.request_id or request_id_of(scope),
        arrival,
        body.priority or 0,
        trace=trace_context_of(scope),
        names=body.names,
        affinity=affinity_of(scope),
        attempt=attempt_of(scope),
        share=share_of(scope),
    )
    return ResponseSpec([task], stream_of, bool(body.stream), headers)


def _ignored(body: GenerateRequest) -> list[str]:
    """Return the names of the ignored fields.

    Raises:
        UnsupportedFieldError: an unimplemented field would change the answer.
    """
    sampling = body.sampling_params.model_extra or {}
    with renamed_params({name: f"sampling_params.{name}" for name in sampling}):
        ignored = ignored_fields(sampling, SAMPLING_UNIMPLEMENTED)
    outer = ignored_fields(body.model_extra or {}, GENERATE_REFUSED)
    return outer + [f"sampling_params.{name}" for name in ignored]
