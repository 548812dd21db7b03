"""Tracks the delivered part of an answer, for another replica to resume it."""

from __future__ import annotations

import json
import time

from starlette.types import Message, Scope

from vlm_serve.errors import VlmServeError
from vlm_serve.server.failover.attempt import TOKENS, Attempt, Delivery
from vlm_serve.server.http.errors import envelope, is_anthropic, messages_envelope
from vlm_serve.server.http.request_id import request_id_of

MAX_TOKENS = 1 << 20
"""An answer with more tokens cannot be resumed."""
INTERNAL = "vlm_serve."
"""Prefix of message keys that are for the gateway only."""


class AnswerProgress:
    """Progress of one request's answer; sees every message to the client.

    Args:
        attempt: everything fixed before any replica has the request.

    Attributes:
        started: the client has received a status.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.started = False
        self._delivery = Delivery(attempt)
        self._streams = False
        self._num_tokens = 0

    def record(self, message: Message) -> None:
        """Record a message sent to the client."""
        self._num_tokens += sum(map(len, message.get(TOKENS, {}).values()))
        if message["type"] == "http.response.start":
            self.started = True
            self._streams = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message.get("headers", ())
            )
        if self._num_tokens <= MAX_TOKENS:
            self._delivery.passed(message)

    def can_resume(self, *, died: bool) -> bool:
        """Return True if another replica may resume the answer.

        Args:
            died: the last replica died; False if it shut down in order.
        """
        if died and self.attempt.deaths:
            return False
        return not self.started or self._num_tokens <= MAX_TOKENS

    def resume(self, *, died: bool) -> None:
        """Set `attempt` to one that resumes from here."""
        self.attempt = self._delivery.next if died else self._delivery.moved
        self._delivery = Delivery(self.attempt)

    def error_event(self, scope: Scope, error: VlmServeError) -> bytes | None:
        """Return the event that ends a broken stream; None if the answer is not a stream."""
        if not self._streams:
            return None
        if is_anthropic(scope):
            body, head = messages_envelope(error, request_id_of(scope)), "event: error\n"
        else:
            body, head = envelope(error), ""
        return f"{head}data: {json.dumps(body)}\n\n".encode()


def for_client(message: Message) -> Message:
    """Return the message without its internal keys."""
    return {name: value for name, value in message.items() if not name.startswith(INTERNAL)}


def first_attempt(scope: Scope, request_timeout: float | None) -> Attempt:
    """Fix everything random or dated before any replica has the request."""
    deadline = None if request_timeout is None else time.time() + request_timeout
    return Attempt.first(request_id_of(scope), deadline)
