"""One choice of a plain completion, in chunks for a stream and complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from vlm_serve.engine.outputs import Delta
from vlm_serve.engine.plan import PromptLogprobs
from vlm_serve.preprocess.prompt import Prompt
from vlm_serve.preprocess.tokenizer import Tokenizer
from vlm_serve.server.api.completions.bodies import CompletionChoice
from vlm_serve.server.api.completions.request import CompletionRequest
from vlm_serve.server.api.logprobs import completion_logprobs, prompt_logprobs_body
from vlm_serve.server.api.reports import routed_experts_fields


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

    def push(self, delta: Delta) -> CompletionChoice | None:
        """Add a delta and return the stream's part for it, or None if it has nothing to report."""
        if self._body.only_echo:
            delta = _without_answer(delta)
        text, body, first = delta.text, self._body, self._last is None
        tokens: tuple[int, ...] = delta.token_ids
        logprobs: tuple[dict[int, float] | None, ...] = delta.logprobs
        if first:
            self._reports = delta.prompt_logprobs
        if body.echo and first:
            text = self._echo() + text
            if body.logprobs is not None and delta.prompt_logprobs is not None:
                tokens = (*self._prompt.token_ids, *tokens)
                unknown = len(self._prompt) - len(delta.prompt_logprobs)
                known = (each.logprobs for each in delta.prompt_logprobs)
                logprobs = (*[None] * unknown, *known, *logprobs)
        offset = self._length
        self._length += len(text)
        self._last = delta
        self._text.append(text)
        self._tokens += delta.token_ids
        self._reported += tokens
        self._logprobs += logprobs
        has_tokens = body.return_token_ids and delta.token_ids
        if not (text or delta.logprobs or delta.finish_reason or has_tokens):
            return None
        reported = (tokens, logprobs)
        return self._part(text, delta.token_ids, reported, offset, with_prompt=first)

    def result(self) -> CompletionChoice:
        reported = (self._reported, self._logprobs)
        choice = self._part("".join(self._text), self._tokens, reported, 0, with_prompt=True)
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs_body(
                self._tokenizer, self._prompt.token_ids, self._reports
            )
        return choice

    def _echo(self) -> str:
        return self._tokenizer.decode(self._prompt.token_ids, skip_special_tokens=False)

    def _part(
        self,
        text: str,
        tokens: Sequence[int],
        reported: tuple[Sequence[int], Sequence[dict[int, float] | None]],
        offset: int,
        *,
        with_prompt: bool,
    ) -> CompletionChoice:
        body, last = self._body, self._last
        assert last is not None
        return CompletionChoice(
            index=self.index,
            text=text,
            logprobs=None
            if body.logprobs is None
            else completion_logprobs(self._tokenizer, *reported, body.logprobs, offset),
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
