"""Log-probabilities in the two forms of the OpenAI API."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vlm_serve.engine.plan import PromptLogprobs
from vlm_serve.preprocess.tokenizer import Tokenizer
from vlm_serve.server.api.bodies import (
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
)

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> TopLogprob:
    raw = tokenizer.token_bytes(token)
    return TopLogprob(
        token=token_text(tokenizer, token),
        logprob=logprob if math.isfinite(logprob) else LOWEST,
        bytes=list(raw) if raw else None,
    )


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """What a token stands for; part of a character is shown as U+FFFD."""
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def ranked(logprobs: dict[int, float], count: int) -> list[tuple[int, float]]:
    """The most likely tokens, the best first."""
    return sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[:count]


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[dict[int, float]], top: int
) -> list[TokenLogprob]:
    """`choices[].logprobs.content`: one entry per token with its `top` most likely rivals."""
    return [
        TokenLogprob(
            **_entry(tokenizer, token, row[token]).model_dump(),
            top_logprobs=[_entry(tokenizer, other, value) for other, value in ranked(row, top)],
        )
        for token, row in zip(tokens, logprobs, strict=True)
    ]


def prompt_logprobs_body(
    tokenizer: Tokenizer, token_ids: Sequence[int], reports: Sequence[PromptLogprobs] | None
) -> list[dict[str, PromptLogprob] | None] | None:
    """`prompt_logprobs`, in vLLM's form: null for the first token and what else is not reported,
    then by token id."""
    if reports is None:
        return None
    unknown = len(token_ids) - len(reports)
    bodies: list[dict[str, PromptLogprob] | None] = [None] * unknown
    for token, report in zip(token_ids[unknown:], reports, strict=True):
        entries = {str(token): _prompt_entry(tokenizer, token, report, report.rank)}
        for rank, (other, _) in enumerate(ranked(report.logprobs, len(report.logprobs)), start=1):
            if other != token:
                entries[str(other)] = _prompt_entry(tokenizer, other, report, rank)
        bodies.append(entries)
    return bodies


def _prompt_entry(
    tokenizer: Tokenizer, token: int, report: PromptLogprobs, rank: int
) -> PromptLogprob:
    return PromptLogprob(
        logprob=max(report.logprobs[token], LOWEST),
        rank=rank,
        decoded_token=token_text(tokenizer, token),
    )


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    logprobs: Sequence[dict[int, float] | None],
    top: int,
    offset: int,
) -> CompletionLogprobs:
    """`choices[].logprobs` of /v1/completions. `offset`: characters before the first token. None in
    `logprobs` is an echoed prompt's first token, or one that is not reported."""
    texts = [token_text(tokenizer, token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[
            None if row is None else max(row[token], LOWEST)
            for token, row in zip(tokens, logprobs, strict=True)
        ],
        top_logprobs=[
            None
            if row is None
            else {
                token_text(tokenizer, other): max(value, LOWEST)
                for other, value in ranked(row, top)
            }
            for row in logprobs
        ]
        if top
        else None,
        text_offset=offsets,
    )
