"""Log-probabilities in the formats of OpenAI's and vLLM's APIs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from vlm_serve.engine.requests.outputs import PromptLogprobs
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.api.shared.fields import PromptLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


Entry = dict[str, Any]
"""The fields of a token's log-probability: a model of them would cost more than the token."""


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> Entry:
    """Return the fields of a `TopLogprob`."""
    raw = tokenizer.token_bytes(token)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": logprob if math.isfinite(logprob) else LOWEST,
        "bytes": list(raw) if raw else None,
    }


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text; an incomplete character becomes U+FFFD."""
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def ranked(logprobs: dict[int, float], count: int) -> list[tuple[int, float]]:
    """Return the most likely tokens, the best one first."""
    return sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[:count]


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[dict[int, float]], top: int
) -> list[Entry]:
    """Return `choices[].logprobs.content`: the fields of a `TokenLogprob` per token, with its `top`
    alternatives."""
    return [
        _entry(tokenizer, token, row[token])
        | {"top_logprobs": [_entry(tokenizer, other, value) for other, value in ranked(row, top)]}
        for token, row in zip(tokens, logprobs, strict=True)
    ]


def prompt_logprobs_body(
    tokenizer: Tokenizer, token_ids: Sequence[int], reports: Sequence[PromptLogprobs] | None
) -> list[dict[str, PromptLogprob] | None] | None:
    """Return `prompt_logprobs` in vLLM's format: one object per token, keyed by token id.

    The first token and others without a report have null.
    """
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


def text_offsets(tokenizer: Tokenizer, tokens: Sequence[int], offset: int) -> list[int]:
    """Return where each token's text begins, if that of the first one begins at `offset`."""
    lengths = (len(token_text(tokenizer, token)) for token in tokens)
    return list(accumulate(lengths, initial=offset))[:-1]


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    logprobs: Sequence[dict[int, float] | None],
    offsets: Sequence[int],
    top: int,
) -> Entry:
    """Return `choices[].logprobs` of /v1/completions: the fields of `CompletionLogprobs`.

    Args:
        logprobs: one row per token; None for an echoed prompt's first token, and for one without a
            report.
        offsets: see `text_offsets`.
    """
    return {
        "tokens": [token_text(tokenizer, token) for token in tokens],
        "token_logprobs": [
            None if row is None else max(row[token], LOWEST)
            for token, row in zip(tokens, logprobs, strict=True)
        ],
        "top_logprobs": [
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
        "text_offset": list(offsets),
    }
