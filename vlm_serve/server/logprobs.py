"""Log-probabilities in the two forms of the OpenAI API."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vlm_serve.preprocess.tokenizer import Tokenizer
from vlm_serve.server.responses import CompletionLogprobs, TokenLogprob, TopLogprob

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


def _ranked(logprobs: dict[int, float], count: int) -> list[tuple[int, float]]:
    return sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[:count]


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[dict[int, float]], top: int
) -> list[TokenLogprob]:
    """`choices[].logprobs.content`: one entry per token with its `top` most likely rivals."""
    return [
        TokenLogprob(
            **_entry(tokenizer, token, row[token]).model_dump(),
            top_logprobs=[_entry(tokenizer, other, value) for other, value in _ranked(row, top)],
        )
        for token, row in zip(tokens, logprobs, strict=True)
    ]


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    logprobs: Sequence[dict[int, float]],
    top: int,
    offset: int,
) -> CompletionLogprobs:
    """`choices[].logprobs` of /v1/completions. `offset`: characters before the first token."""
    texts = [token_text(tokenizer, token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[
            max(row[token], LOWEST) for token, row in zip(tokens, logprobs, strict=True)
        ],
        top_logprobs=[
            {token_text(tokenizer, other): max(value, LOWEST) for other, value in _ranked(row, top)}
            for row in logprobs
        ]
        if top
        else None,
        text_offset=offsets,
    )
