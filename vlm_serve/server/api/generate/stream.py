"""The response to a request for tokens, complete and as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlm_serve.engine.outputs import Delta
from vlm_serve.preprocess.tokenizer import Tokenizer
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.answer import AnswerStream, Event
from vlm_serve.server.api.generate.bodies import (
    Generated,
    GeneratedChoice,
    GeneratedLogprobs,
    GeneratedToken,
    TokenRival,
)
from vlm_serve.server.api.generate.request import GenerateRequest
from vlm_serve.server.api.logprobs import LOWEST, prompt_logprobs_body, ranked
from vlm_serve.server.api.reports import cache_report_body, routed_experts_fields, usage_body


class GenerateStream(AnswerStream):
    """The chunks of all choices. Tokens are named by their ids; no text is sent."""

    def __init__(
        self,
        body: GenerateRequest,
        tokenizer: Tokenizer,
        generation: Generation,
        *,
        model: str,
        created: int,
    ) -> None:
        self._body = body
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

    def push(self, prompt: int, delta: Delta) -> list[Event]:
        part = self._part(delta)
        choice = self._choices[delta.index]
        choice.token_ids += part.token_ids
        if choice.logprobs is not None and part.logprobs is not None:
            choice.logprobs.content += part.logprobs.content
        if part.finish_reason is not None:
            choice.finish_reason = part.finish_reason
            choice.routed_experts = part.routed_experts
            choice.routed_experts_gaps = part.routed_experts_gaps
        if not (part.token_ids or part.finish_reason):
            return []
        chunk = self._chunk([part])
        if self._option("continuous_usage_stats"):
            chunk["usage"] = self._usage()
        if not (self._generation.unfinished or self._option("include_usage")):
            chunk |= self._final_fields()
        return [chunk]

    def end(self) -> list[Event]:
        if not self._option("include_usage"):
            return []
        return [self._chunk([]) | {"usage": self._usage()} | self._final_fields()]

    def result(self) -> Generated:
        generation = self._generation
        return Generated(
            request_id=generation.task.request_id,
            model=self._model,
            created=self._created,
            choices=self._choices,
            usage=usage_body(generation.usage, generation.prompt),
            prompt_logprobs=prompt_logprobs_body(
                self._tokenizer, generation.prompt.token_ids, generation.prompt_logprobs
            ),
            cache_report=cache_report_body(generation.cache_report)
            if self._body.cache_report
            else None,
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

    def _chunk(self, choices: list[GeneratedChoice]) -> Event:
        return {
            "request_id": self._generation.task.request_id,
            "choices": [choice.model_dump() for choice in choices],
            "usage": None,
        }

    def _usage(self) -> dict[str, Any]:
        return usage_body(self._generation.usage, self._generation.prompt).model_dump()

    def _final_fields(self) -> dict[str, Any]:
        report = cache_report_body(self._generation.cache_report)
        if not self._body.cache_report or report is None:
            return {}
        return {"cache_report": report.model_dump()}

    def _option(self, name: str) -> bool:
        options = self._body.stream_options
        return options is not None and bool(getattr(options, name))


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
