"""An in-process client of the server's routes, and the content of its replies.

Requests pass the same checks as over HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from vlm_serve.server.http.body import receiver


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A complete response."""

    status: int
    headers: dict[str, str]
    body: bytes


async def post(
    app: ASGIApp,
    path: str,
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
    state: Mapping[str, Any] | None = None,
) -> HttpReply:
    """Send JSON to a route and return the complete response.

    Cancelling it ends the request, as a disconnecting client does.

    Args:
        state: of the request's scope, as authentication leaves it.
    """
    status = 500
    head: dict[str, str] = {}
    parts: list[bytes] = []

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            head.update((name.decode(), value.decode()) for name, value in message["headers"])
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *headers,
        ],
        "client": None,
        "server": None,
        "state": dict(state or {}),
    }
    await app(scope, receiver(body), send)
    return HttpReply(status, head, b"".join(parts))


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


def reply_json(reply: HttpReply) -> Any:
    """Parse the reply's body as JSON; None if it is not JSON."""
    try:
        return json.loads(reply.body)
    except ValueError:
        return None


def error_code(reply: HttpReply) -> str | None:
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
    # Anthropic's API counts these two beside `input_tokens`.
    prompt += usage.get("cache_read_input_tokens") or 0
    prompt += usage.get("cache_creation_input_tokens") or 0
    generated = usage.get("completion_tokens", usage.get("output_tokens", 0)) or 0
    prompt_details = usage.get("prompt_tokens_details", usage.get("input_tokens_details")) or {}
    cached = prompt_details.get("cached_tokens", usage.get("cache_read_input_tokens", 0)) or 0
    answer_details = (
        usage.get("completion_tokens_details", usage.get("output_tokens_details")) or {}
    )
    return TokenUsage(prompt, cached, generated, answer_details.get("reasoning_tokens", 0) or 0)
