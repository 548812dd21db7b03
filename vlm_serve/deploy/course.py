"""How far an answer has come, so that another replica can go on with it."""

from __future__ import annotations

import json
import time

from starlette.types import Message, Scope

from vlm_serve.errors import VlmServeError
from vlm_serve.server.failover.attempt import TOKENS, Attempt, Delivery
from vlm_serve.server.http.errors import envelope, is_anthropic, messages_envelope
from vlm_serve.server.http.request_id import request_id_of

MAX_TOKENS = 1 << 20
"""An answer with more of them cannot be gone on with."""
INTERNAL = "vlm_serve."
"""Begins the keys of a message that are for the front alone."""


class Course:
    """Of one request, whose answer's messages pass here one after the other.

    Args:
        attempt: what was fixed before any replica was asked.

    Attributes:
        started: the client has a status.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.started = False
        self._delivery = Delivery(attempt)
        self._streams = False
        self._num_tokens = 0

    def passed(self, message: Message) -> None:
        """Notes a message that the client has got."""
        self._num_tokens += sum(map(len, message.get(TOKENS, {}).values()))
        if message["type"] == "http.response.start":
            self.started = True
            self._streams = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message.get("headers", ())
            )
        if self._num_tokens <= MAX_TOKENS:
            self._delivery.passed(message)

    def can_go_on(self, *, died: bool) -> bool:
        """Whether another replica can be asked now.

        Args:
            died: the replica that had it; else it has ended in order.
        """
        if died and self.attempt.deaths:
            return False
        return not self.started or self._num_tokens <= MAX_TOKENS

    def go_on(self, *, died: bool) -> None:
        """Makes the attempt one that goes on from here."""
        self.attempt = self._delivery.next if died else self._delivery.moved
        self._delivery = Delivery(self.attempt)

    def last_words(self, scope: Scope, error: VlmServeError) -> bytes | None:
        """The end of a stream that broke off; None for an answer that must just break off."""
        if not self._streams:
            return None
        if is_anthropic(scope):
            body, head = messages_envelope(error, request_id_of(scope)), "event: error\n"
        else:
            body, head = envelope(error), ""
        return f"{head}data: {json.dumps(body)}\n\n".encode()


def for_client(message: Message) -> Message:
    """A message without what is for the front alone."""
    return {name: value for name, value in message.items() if not name.startswith(INTERNAL)}


def first_attempt(scope: Scope, request_timeout: float | None) -> Attempt:
    """What is random or dated, fixed before any replica is asked."""
    deadline = None if request_timeout is None else time.time() + request_timeout
    return Attempt.first(request_id_of(scope), deadline)
