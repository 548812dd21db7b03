"""The route of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from fastapi import Request
from starlette.responses import Response

from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.answer import Incoming, ResponseSpec, answer_prompt
from vlm_serve.server.api.completions.request import CompletionRequest, checked_prompts
from vlm_serve.server.api.completions.stream import CompletionStream
from vlm_serve.server.api.prompts import prepare_tokens
from vlm_serve.server.api.request_affinity import affinity_of
from vlm_serve.server.api.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.service import Service


async def completions(service: Service, request: Request) -> Response:
    """Continue one or several prompts. It raises as `respond` does."""
    return await answer_prompt(service, request, "completions", CompletionRequest, _spec)


def _spec(incoming: Incoming, body: CompletionRequest, conversation: Conversation) -> ResponseSpec:
    headers = ignored_header(ignored_fields(body.model_extra or {}))
    params, service = body.sampling_params(), incoming.service
    own = incoming.key_scope(body)
    model = service.state.resolve_model(body.model)
    names = {"messages": "prompt", "structured_outputs": body.form_field}

    def stream_of(generations: Sequence[Generation]) -> CompletionStream:
        return CompletionStream(
            body,
            service.tokenizer,
            generations,
            model=model,
            created=incoming.created,
        )

    kept = params.kept_prompt_tokens(service.engine.max_model_len)
    prompts: Iterable[tuple[int, str | list[int]]] = enumerate(checked_prompts(conversation))
    tasks = [
        incoming.task(
            body,
            partial(prepare_tokens, service, prompt, own, kept),
            params,
            names=names,
            number=number,
        )
        for number, prompt in prompts
    ]
    tasks[0] = replace(tasks[0], affinity=affinity_of(incoming.scope))
    return ResponseSpec(tasks, stream_of, bool(body.stream), headers)
