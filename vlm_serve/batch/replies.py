"""The content of replies to a batch's requests."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from vlm_serve.batch.asgi import Reply


class TokenUsage(NamedTuple):
    """Tokens of one answer.

    Attributes:
        prompt: tokens of the prompt.
        cached: how many of them were found in the cache.
        generated: tokens of the answer.
        reasoning: how many of them were a thought.
    """

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    reasoning: int = 0


def reply_json(reply: Reply) -> Any:
    """Parse the reply's body as JSON; None if it is not JSON."""
    try:
        return json.loads(reply.body)
    except ValueError:
        return None


def error_code(reply: Reply) -> str | None:
    """Return the code of an error reply, None for an answer."""
    if reply.status < 400:
        return None
    body = reply_json(reply)
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else "error"


def usage_of(body: Any) -> TokenUsage:
    """Return the tokens of an answer, in the form of any API."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return TokenUsage()
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0)) or 0
    generated = usage.get("completion_tokens", usage.get("output_tokens", 0)) or 0
    found = usage.get("prompt_tokens_details", usage.get("input_tokens_details")) or {}
    cached = found.get("cached_tokens", usage.get("cache_read_input_tokens", 0)) or 0
    made = usage.get("completion_tokens_details", usage.get("output_tokens_details")) or {}
    return TokenUsage(prompt, cached, generated, made.get("reasoning_tokens", 0) or 0)
