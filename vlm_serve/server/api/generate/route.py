"""The route of POST /inference/v1/generate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import Request
from starlette.responses import Response

from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.answer import Incoming, ResponseSpec, answer_prompt
from vlm_serve.server.api.generate.request import (
    GENERATE_REFUSED,
    SAMPLING_UNIMPLEMENTED,
    GenerateRequest,
)
from vlm_serve.server.api.generate.stream import GenerateStream
from vlm_serve.server.api.prompts import prepare_tokens
from vlm_serve.server.api.request_affinity import affinity_of
from vlm_serve.server.api.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.http.errors import renamed_params
from vlm_serve.server.service import Service


async def generate(service: Service, request: Request) -> Response:
    """Continue a prompt of token ids. It raises as `respond` does."""
    return await answer_prompt(service, request, "generate", GenerateRequest, _spec)


def _spec(incoming: Incoming, body: GenerateRequest, _: Conversation) -> ResponseSpec:
    headers, service = ignored_header(_ignored(body)), incoming.service
    own = incoming.key_scope(body)
    model = service.state.resolve_model(body.model)

    def stream_of(generations: Sequence[Generation]) -> GenerateStream:
        return GenerateStream(
            body, service.tokenizer, generations[0], model=model, created=incoming.created
        )

    params = body.params()
    kept = params.kept_prompt_tokens(service.engine.max_model_len)
    task = incoming.task(
        body,
        partial(prepare_tokens, service, body.token_ids, own, kept),
        params,
        names=body.names,
        affinity=affinity_of(incoming.scope),
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
