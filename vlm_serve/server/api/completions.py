"""POST /v1/completions: prompts as text or token ids, without a chat template.

The bodies are OpenAI's; docs/http-api.md lists the additions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar, Literal

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
from vlm_serve.server.api.shared.chunks import ChunkStream, Part
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
    prompt_logprobs_body,
    text_offsets,
)
from vlm_serve.server.api.shared.request_body import affinity_of
from vlm_serve.server.api.shared.sampling import sampling_of, structured_outputs_of, with_sampling
from vlm_serve.server.api.shared.unknown_fields import ignored_fields, ignored_header
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
    def only_prompt(self) -> bool:
        """True if the prompt alone is wanted, for its log-probabilities."""
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
            max_tokens=limit,
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
        self._last: Delta | None = None

    def push(self, deltas: Sequence[Delta]) -> list[Part]:
        """Add deltas and return the stream's part for them, or none if they have nothing to
        report."""
        first, places = self._last is None, list[int]()
        text, ids, reported = len(self._text), len(self._tokens), len(self._reported)
        for delta in deltas:
            before = len(self._reported)
            length = self._add(_without_answer(delta) if self._body.only_prompt else delta)
            if self._body.logprobs is not None:
                places += text_offsets(self._tokenizer, self._reported[before:], self._length)
            self._length += length
        told, tokens = "".join(self._text[text:]), self._tokens[ids:]
        rows = self._reported[reported:], self._logprobs[reported:]
        ended = deltas[-1].finish_reason
        if not (told or rows[1] or ended or (self._body.return_token_ids and tokens)):
            return []
        return [self._part(told, tokens, (*rows, places), with_prompt=first)]

    def _add(self, delta: Delta) -> int:
        """Add a delta and return the length of its text, behind an echo if it is the first one."""
        text, body, prompt = delta.text, self._body, self._prompt.token_ids
        if self._last is None:
            self._reports = reports = delta.prompt_logprobs
            if body.echo:
                text = self._tokenizer.decode(prompt, skip_special_tokens=False) + text
            if body.echo and body.logprobs is not None and reports is not None:
                self._reported += prompt
                self._logprobs += [None] * (len(prompt) - len(reports))
                self._logprobs += [report.logprobs for report in reports]
        self._last = delta
        self._text.append(text)
        self._tokens += delta.token_ids
        self._reported += delta.token_ids
        self._logprobs += delta.logprobs
        return len(text)

    def result(self) -> CompletionChoice:
        places = text_offsets(self._tokenizer, self._reported, 0)
        rows = (self._reported, self._logprobs, places)
        part = self._part("".join(self._text), self._tokens, rows, with_prompt=True)
        choice = CompletionChoice.model_validate(part)
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs_body(
                self._tokenizer, self._prompt.token_ids, self._reports
            )
        return choice

    def _part(
        self,
        text: str,
        tokens: Sequence[int],
        rows: tuple[Sequence[int], Sequence[dict[int, float] | None], Sequence[int]],
        *,
        with_prompt: bool,
    ) -> Part:
        """Return the fields of a `CompletionChoice`, in their order."""
        body, last = self._body, self._last
        assert last is not None
        top, logprobs = body.logprobs, None
        if top is not None:
            logprobs = completion_logprobs(self._tokenizer, *rows, top)
        part = {"index": self.index, "text": text, "logprobs": logprobs}
        part["finish_reason"] = last.finish_reason
        if last.stop_reason is not None:
            part["stop_reason"] = last.stop_reason
        if body.return_token_ids:
            part["token_ids"] = list(tokens)
            if with_prompt:
                part["prompt_token_ids"] = list(self._prompt.token_ids)
        return part | routed_experts_fields(last)


def _without_answer(delta: Delta) -> Delta:
    ended: Literal["length"] | None = None if delta.finish_reason is None else "length"
    return dataclasses.replace(
        delta, text="", token_ids=(), logprobs=(), finish_reason=ended, stop_reason=None
    )


class CompletionStream(ChunkStream):
    """The chunks of all choices. Choice `p * n + i` is the i-th of prompt p."""

    nothing: ClassVar[Part] = {"text": ""}

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

    def parts(self, prompt: int, deltas: Sequence[Delta]) -> list[Part]:
        return self._choices[prompt][deltas[0].index].push(deltas)

    def chunk(self, choices: list[Part]) -> Part:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def total(self) -> Usage:
        return self._body.counted(super().total())

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
