"""POST /inference/v1/generate: token ids in, token ids out, in vLLM's format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.shared.answer import Incoming, ResponseSpec, answer_prompt
from vlm_serve.server.api.shared.chunks import ChunkStream, Part
from vlm_serve.server.api.shared.conversation import prepare_tokens
from vlm_serve.server.api.shared.fields import (
    AnswerRequest,
    CacheReportBody,
    Optional,
    PromptLogprobsBody,
    RequestModel,
    StreamOptions,
    Table,
    Tokens,
    UsageBody,
    Whole,
    check_stream,
    routed_experts_fields,
)
from vlm_serve.server.api.shared.logprobs import LOWEST, prompt_logprobs_body, ranked
from vlm_serve.server.api.shared.request_body import affinity_of
from vlm_serve.server.api.shared.sampling import sampling_of, structured_outputs_of, with_sampling
from vlm_serve.server.api.shared.unknown_fields import UNIMPLEMENTED, ignored_fields, ignored_header
from vlm_serve.server.http.errors import renamed_params
from vlm_serve.server.service import Service

GENERATE_REFUSED: dict[str, tuple[Any, ...]] = {
    "ec_transfer_params": ({},),
    "features": ({},),
    "kv_transfer_params": ({},),
}

SAMPLING_REFUSED: dict[str, tuple[Any, ...]] = {
    "extra_args": ({},),
    "logprob_token_ids": (),
    "prompt_logprob_start": (0,),
    "prompt_logprob_token_ids": (),
    "trace_decode_token_ids": (),
}
SAMPLING_UNIMPLEMENTED = SAMPLING_REFUSED | {
    name: neutral
    for name, neutral in UNIMPLEMENTED.items()
    if name != "spaces_between_special_tokens"  # which concerns only text
}


@with_sampling("generate")
class TokenSampling(RequestModel):
    """`sampling_params`, with the field names of `SamplingParams`."""

    prompt_logprobs: Whole | None = None
    structured_outputs: Table[Any] | None = None
    regex: str | None = None


# Internal field name -> this API's name for it, for errors.
NAMES = {name: f"sampling_params.{name}" for name in TokenSampling.model_fields} | {
    "prompt": "token_ids",
    "messages": "token_ids",
}


class GenerateRequest(AnswerRequest):
    token_ids: Tokens = Field(min_length=1)
    sampling_params: TokenSampling
    stream_options: StreamOptions | None = None

    @property
    def names(self) -> dict[str, str]:
        """The client's names of internal fields, for errors."""
        form = "structured_outputs" if self.sampling_params.regex is None else "regex"
        return NAMES | {"structured_outputs": f"sampling_params.{form}"}

    def params(self) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            InvalidRequestError: a field is invalid; the error names it.
        """
        given = self.sampling_params
        with renamed_params(NAMES):
            check_stream(self.stream, self.stream_options, given.prompt_logprobs)
            form = structured_outputs_of(None, given.structured_outputs, given.regex)
            return sampling_of("generate", given, structured_outputs=form)


class TokenRival(BaseModel):
    token: str
    logprob: float
    bytes: None = None


class GeneratedToken(TokenRival):
    top_logprobs: list[TokenRival]


class GeneratedLogprobs(BaseModel):
    content: list[GeneratedToken]


class GeneratedChoice(BaseModel):
    index: int
    logprobs: GeneratedLogprobs | None = None
    finish_reason: str | None
    token_ids: list[int]
    routed_experts: str | None = None
    routed_experts_gaps: Optional[list[tuple[int, int]]] = None


class Generated(BaseModel):
    request_id: str
    model: str
    created: int
    choices: list[GeneratedChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobsBody | None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    cache_report: Optional[CacheReportBody] = None


class GenerateStream(ChunkStream):
    """The chunks of all choices. Tokens are named by their ids; no text is sent."""

    def __init__(
        self,
        body: GenerateRequest,
        tokenizer: Tokenizer,
        model: str,
        created: int,
        generations: Sequence[Generation],
    ) -> None:
        super().__init__(body, body.stream_options, generations)
        self.tells_usage = True
        (generation,) = generations
        self._tokenizer = tokenizer
        self._generation = generation
        self._model, self._created = model, created
        params = generation.task.params
        self._top = params.logprobs
        self._choices = [
            GeneratedChoice(
                index=index,
                logprobs=None if self._top is None else GeneratedLogprobs(content=[]),
                finish_reason=None,
                token_ids=[],
            )
            for index in range(params.n)
        ]

    def parts(self, prompt: int, deltas: Sequence[Delta]) -> list[Part]:
        tokens = tuple(token for delta in deltas for token in delta.token_ids)
        logprobs = tuple(row for delta in deltas for row in delta.logprobs)
        delta = replace(deltas[-1], token_ids=tokens, logprobs=logprobs)
        part = self._part(delta)
        choice = self._choices[delta.index]
        choice.token_ids += part.token_ids
        if choice.logprobs is not None and part.logprobs is not None:
            choice.logprobs.content += part.logprobs.content
        if part.finish_reason is not None:
            choice.finish_reason = part.finish_reason
            choice.routed_experts = part.routed_experts
            choice.routed_experts_gaps = part.routed_experts_gaps
        return [part.model_dump()] if part.token_ids or part.finish_reason else []

    def chunk(self, choices: list[Part]) -> Part:
        return {"request_id": self._generation.task.request_id, "choices": choices}

    def result(self) -> Generated:
        generation = self._generation
        return Generated(
            request_id=generation.task.request_id,
            model=self._model,
            created=self._created,
            choices=self._choices,
            usage=self.usage(),
            prompt_logprobs=prompt_logprobs_body(
                self._tokenizer, generation.prompt.token_ids, generation.prompt_logprobs
            ),
            cache_report=self.report(),
        )

    def _part(self, delta: Delta) -> GeneratedChoice:
        logprobs = None
        if self._top is not None and delta.token_ids:
            logprobs = _logprobs(delta.token_ids, delta.logprobs, self._top)
        return GeneratedChoice(
            index=delta.index,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            token_ids=list(delta.token_ids),
            **routed_experts_fields(delta),
        )


def _logprobs(
    tokens: Sequence[int], rows: Sequence[dict[int, float]], top: int
) -> GeneratedLogprobs:
    return GeneratedLogprobs(
        content=[
            GeneratedToken(
                **_rival(token, row[token]).model_dump(),
                # With `logprobs` 0, vLLM lists the token itself.
                top_logprobs=[_rival(other, value) for other, value in ranked(row, max(top, 1))],
            )
            for token, row in zip(tokens, rows, strict=True)
        ]
    )


def _rival(token: int, logprob: float) -> TokenRival:
    return TokenRival(token=f"token_id:{token}", logprob=max(logprob, LOWEST))


async def generate(service: Service, request: Request) -> Response:
    """Continue a prompt of token ids. It raises as `respond` does."""
    return await answer_prompt(service, request, "generate", GenerateRequest, _spec)


def _spec(incoming: Incoming, body: GenerateRequest, _: Conversation) -> ResponseSpec:
    headers, service = ignored_header(_ignored(body)), incoming.service
    scope = incoming.key_scope(body)
    model = service.state.resolve_model(body.model)
    stream_of = partial(GenerateStream, body, service.tokenizer, model, incoming.created)
    params = body.params()
    kept = params.kept_prompt_tokens(service.engine.max_model_len)
    task = incoming.task(
        body,
        partial(prepare_tokens, service, body.token_ids, scope, kept),
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
