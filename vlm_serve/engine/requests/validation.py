"""Validation of requests to an engine. All functions raise InvalidRequestError or a subclass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlm_serve.errors import ContextLengthError, FieldError, InvalidRequestError
from vlm_serve.models import ModelSpec
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams

MAX_TREE_NODES = 1000
MAX_PIN_SECONDS = 30 * 24 * 3600.0


def check_request(
    prompt: Prompt, params: SamplingParams, model: ModelSpec, max_model_len: int
) -> None:
    """Check a request against the model. Raise ContextLengthError if prompt and answer do not fit.
    Raise InvalidRequestError for an empty prompt or parameters that do not fit the model."""
    check_prompt(prompt)
    length = len(prompt)
    wanted = params.max_tokens or 1
    if length + 1 > max_model_len or (
        params.max_tokens is not None and length + wanted > max_model_len
    ):
        need = (
            f"the request needs {length + wanted} "
            f"({length} in the prompt and {wanted} for the answer)"
        )
        raise ContextLengthError.beyond(max_model_len, str(length), need, "messages")
    if params.min_tokens > max_model_len - length:
        raise InvalidRequestError(
            f"min_tokens must be at most {max_model_len - length} after this prompt",
            param="min_tokens",
        )
    if params.prompt_logprobs_start >= length:
        raise InvalidRequestError(
            f"prompt_logprobs_start must be less than the prompt's {length} tokens",
            param="prompt_logprobs_start",
        )
    _check_experts(length, params, model)
    vocabulary = model.vocab_size
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
        for token in getattr(params, name) or ():
            if token >= vocabulary:
                raise InvalidRequestError(
                    f"{name}: {token} is outside the vocabulary of {vocabulary}", param=name
                )


def with_token_limit(
    params: SamplingParams, generation: Mapping[str, Any], room: int
) -> SamplingParams:
    """Return the parameters within the generation config's `max_new_tokens`. As in vLLM, it
    bounds every answer.

    Args:
        room: tokens that the context leaves for the answer.
    """
    most, wanted = generation.get("max_new_tokens"), params.max_tokens
    if not isinstance(most, int) or most < 1 or (room if wanted is None else wanted) <= most:
        return params
    return replace(params, max_tokens=most)


def check_logprobs(params: SamplingParams, most: int) -> None:
    """Check the numbers of log-probabilities per token against the configured maximum."""
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > most:
            raise FieldError(name, f"must be at most {most} here (--max-logprobs), got {count}")


def check_forced(forced: Sequence[Sequence[int]], choices: int, vocabulary: int) -> None:
    """Check forced tokens; raise InvalidRequestError if no answer can begin with them."""
    if len(forced) > choices:
        raise InvalidRequestError(f"forced: there are only {choices} choices", param="forced")
    for token in (token for tokens in forced for token in tokens):
        if not 0 <= token < vocabulary:
            raise InvalidRequestError(
                f"forced: {token} is outside the vocabulary of {vocabulary}", param="forced"
            )


def _check_experts(length: int, params: SamplingParams, model: ModelSpec) -> None:
    if params.return_routed_experts and model.routing is None:
        raise InvalidRequestError(
            "return_routed_experts: this model has no routed experts",
            param="return_routed_experts",
        )
    if params.routed_experts_prompt_start >= length:
        raise InvalidRequestError(
            f"routed_experts_prompt_start must be less than the prompt's {length} tokens",
            param="routed_experts_prompt_start",
        )


def check_page(offset: int, limit: int) -> None:
    """Check a page; raise InvalidRequestError if it is invalid."""
    if offset < 0:
        raise InvalidRequestError(f"offset must be at least 0, got {offset}", param="offset")
    if not 1 <= limit <= MAX_TREE_NODES:
        raise InvalidRequestError(
            f"limit must be at least 1 and at most {MAX_TREE_NODES}, got {limit}", param="limit"
        )


def check_ttl(ttl_seconds: float) -> None:
    """Check a time to live; raise InvalidRequestError if it is invalid."""
    if not (math.isfinite(ttl_seconds) and 0 < ttl_seconds <= MAX_PIN_SECONDS):
        raise InvalidRequestError(
            f"ttl_seconds must be more than 0 and at most {MAX_PIN_SECONDS:.0f}, got {ttl_seconds}",
            param="ttl_seconds",
        )


def check_prompt(prompt: Prompt) -> None:
    """Check a prompt; raise InvalidRequestError if it is empty."""
    if not len(prompt):
        raise InvalidRequestError("the prompt is empty", param="messages")
