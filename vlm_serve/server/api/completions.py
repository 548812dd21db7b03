"""POST /v1/completions: prompts as text or token ids, without a chat template.

The bodies are OpenAI's; docs/http-api.md lists the additions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.engine.requests.outputs import Delta, PromptLogprobs, Usage
from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.shared.answer import Incoming, ResponseSpec, answer_prompt
from vlm_serve.server.api.shared.chunks import ChunkStream, Framed, Part
from vlm_serve.server.api.shared.conversation import prepare_tokens
from vlm_serve.server.api.shared.fields import (
    CacheReportBody,
    CompletionLogprobs,
    GenerationRequest,
    Items,
    Optional,
    PromptLogprobsBody,
    Tokens,
    UsageBody,
    Whole,
    check_stream,
    routed_experts_fields,
)
from vlm_serve.server.api.shared.logprobs import (
    completion_logprobs,
    joined_logprobs,
    prompt_logprobs_body,
)
from vlm_serve.server.api.shared.request_body import affinity_of
from vlm_serve.server.api.shared.sampling import sampling_of, structured_outputs_of, with_sampling
from vlm_serve.server.api.shared.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.http.frames import GAP
from vlm_serve.server.http.streaming import to_json
from vlm_serve.server.service import Service

MAX_PROMPTS = 128
DEFAULT_COMPLETION_TOKENS = 16


@with_sampling("completions")
class CompletionRequest(GenerationRequest):
    prompt: str | Items[str] | Tokens | Items[Tokens]
    max_tokens: Whole | None = None
    logprobs: Whole | None = None
    echo: bool | None = None

    @property
    def only_echo(self) -> bool:
        """Only the prompt is wanted, for its logprobs."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            InvalidRequestError: a field is out of range; the error names it.
        """
        check_stream(self.stream, self.stream_options, self.prompt_logprobs)
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        echoed = self.echo and self.prompt_logprobs is None
        return sampling_of(
            "completions",
            self,
            # The engine generates at least one token; the response omits it.
            max_tokens=1 if self.only_echo else limit,
            prompt_logprobs=self.logprobs if echoed else self.prompt_logprobs,
            structured_outputs=structured_outputs_of(
                self.response_format, self.structured_outputs, self.regex
            ),
        )


def checked_prompts(conversation: Conversation) -> list[str] | list[list[int]]:
    """Return the prompts of a request.

    Raises:
        InvalidRequestError: there are no prompts, too many, or empty ones.
    """
    prompts = conversation.prompts
    if not prompts or not all(prompts):
        raise InvalidRequestError("prompt must not be empty", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(f"at most {MAX_PROMPTS} prompts per request", param="prompt")
    return prompts


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: Optional[int | str] = None
    token_ids: Optional[list[int]] = None
    prompt_token_ids: Optional[list[int]] = None
    prompt_logprobs: Optional[PromptLogprobsBody] = None
    routed_experts: Optional[str] = None
    routed_experts_gaps: Optional[list[tuple[int, int]]] = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody
    cache_report: Optional[CacheReportBody | list[CacheReportBody]] = None


class CompletionChoiceState:
    """Gathers the deltas of one choice."""

    def __init__(
        self, tokenizer: Tokenizer, body: CompletionRequest, index: int, prompt: Prompt
    ) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self.index = index
        self._prompt = prompt
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._reported: list[int] = []
        self._logprobs: list[dict[int, float] | None] = []
        self._reports: tuple[PromptLogprobs, ...] | None = None
        self._length = 0
        self._last = Delta(index)
        self._begun, self._only_echo = False, body.only_echo

    def push(self, deltas: Sequence[Delta]) -> Part | Framed | None:
        """Add deltas and return the stream's part for them, or None if they have nothing to
        report."""
        body, first = self._body, not self._begun
        texts, ids, reports = list[str](), list[int](), list[Part]()
        told = False
        for delta in deltas:
            if self._only_echo:
                delta = _without_answer(delta)
            text, offset = delta.text, self._length
            tokens: Sequence[int] = delta.token_ids
            rows: Sequence[dict[int, float] | None] = delta.logprobs
            if not self._begun:
                text, tokens, rows = self._first(delta)
            self._length += len(text)
            self._begun, self._last = True, delta
            self._reported += tokens
            self._logprobs += rows
            texts.append(text)
            ids += delta.token_ids
            told = told or bool(text or delta.logprobs or delta.finish_reason)
            if body.logprobs is not None:
                told_so = completion_logprobs(self._tokenizer, tokens, rows, body.logprobs, offset)
                reports.append(told_so)
        self._text += texts
        self._tokens += ids
        if not told and not (body.return_token_ids and ids):
            return None
        text, logprobs = "".join(texts), joined_logprobs(reports)
        if first or self._last.finish_reason is not None:
            return self._part(text, ids, logprobs, with_prompt=first).model_dump()
        values = [to_json(text)]
        if body.logprobs is not None:
            values.append(to_json(logprobs))
        if body.return_token_ids:
            values.append(to_json(ids))
        return Framed("", self._shape, tuple(values))

    def _first(self, delta: Delta) -> tuple[str, Sequence[int], Sequence[dict[int, float] | None]]:
        """Return the text of the first delta and its reported tokens, behind the echo."""
        text, tokens, logprobs = delta.text, delta.token_ids, delta.logprobs
        self._reports = delta.prompt_logprobs
        if not self._body.echo:
            return text, tokens, logprobs
        text = self._tokenizer.decode(self._prompt.token_ids, skip_special_tokens=False) + text
        if self._body.logprobs is None or delta.prompt_logprobs is None:
            return text, tokens, logprobs
        unknown = len(self._prompt) - len(delta.prompt_logprobs)
        known = (token.logprobs for token in delta.prompt_logprobs)
        return text, (*self._prompt.token_ids, *tokens), (*[None] * unknown, *known, *logprobs)

    def _shape(self) -> Part:
        """Return a part of the middle of the answer with gaps."""
        part = self._part("", (), None, with_prompt=False).model_dump()
        part |= {"text": GAP, "logprobs": None if self._body.logprobs is None else GAP}
        return part | ({"token_ids": GAP} if self._body.return_token_ids else {})

    def result(self) -> CompletionChoice:
        logprobs = None
        if self._body.logprobs is not None:
            rows = (self._reported, self._logprobs, self._body.logprobs, 0)
            logprobs = completion_logprobs(self._tokenizer, *rows)
        choice = self._part("".join(self._text), self._tokens, logprobs, with_prompt=True)
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs_body(
                self._tokenizer, self._prompt.token_ids, self._reports
            )
        return choice

    def _part(
        self, text: str, tokens: Sequence[int], logprobs: Any, *, with_prompt: bool
    ) -> CompletionChoice:
        body, last = self._body, self._last
        return CompletionChoice(
            index=self.index,
            text=text,
            logprobs=logprobs,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            token_ids=list(tokens) if body.return_token_ids else None,
            prompt_token_ids=list(self._prompt.token_ids)
            if body.return_token_ids and with_prompt
            else None,
            **routed_experts_fields(last),
        )


def _without_answer(delta: Delta) -> Delta:
    ended: Literal["length"] | None = None if delta.finish_reason is None else "length"
    return dataclasses.replace(
        delta, text="", token_ids=(), logprobs=(), finish_reason=ended, stop_reason=None
    )


class CompletionStream(ChunkStream):
    """The chunks of all choices. Choice `p * n + i` is the i-th of prompt p."""

    def __init__(
        self,
        body: CompletionRequest,
        tokenizer: Tokenizer,
        model: str,
        created: int,
        generations: Sequence[Generation],
    ) -> None:
        super().__init__(body, body.stream_options, generations)
        self._body = body
        self._id = f"cmpl-{generations[0].task.request_id}"
        self._model, self._created = model, created
        self._choices = [
            [
                CompletionChoiceState(tokenizer, body, number * count + index, generation.prompt)
                for index in range(count)
            ]
            for number, generation in enumerate(generations)
            for count in [generation.task.params.n]
        ]

    def parts(self, prompt: int, deltas: Sequence[Delta]) -> Sequence[Part | Framed]:
        part = self._choices[prompt][deltas[0].index].push(deltas)
        return [] if part is None else [part]

    def chunk(self, choices: list[Part]) -> Part:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def total(self) -> Usage:
        total = super().total()
        return dataclasses.replace(total, completion_tokens=0) if self._body.only_echo else total

    def result(self) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[choice.result() for choices in self._choices for choice in choices],
            usage=self.usage(),
            cache_report=self.report(),
        )


async def completions(service: Service, request: Request) -> Response:
    """Continue one or several prompts. It raises as `respond` does."""
    return await answer_prompt(service, request, "completions", CompletionRequest, _spec)


def _spec(incoming: Incoming, body: CompletionRequest, conversation: Conversation) -> ResponseSpec:
    headers = ignored_header(ignored_fields(body.model_extra or {}))
    params, service = body.sampling_params(), incoming.service
    scope = incoming.key_scope(body)
    model = service.state.resolve_model(body.model)
    names = {"messages": "prompt", "structured_outputs": body.form_field}
    stream_of = partial(CompletionStream, body, service.tokenizer, model, incoming.created)
    kept = params.kept_prompt_tokens(service.engine.max_model_len)
    prompts: Iterable[tuple[int, str | list[int]]] = enumerate(checked_prompts(conversation))
    tasks = [
        incoming.task(
            body,
            partial(prepare_tokens, service, prompt, scope, kept),
            params,
            names=names,
            number=number,
        )
        for number, prompt in prompts
    ]
    tasks[0] = dataclasses.replace(tasks[0], affinity=affinity_of(incoming.scope))
    return ResponseSpec(tasks, stream_of, bool(body.stream), headers)
