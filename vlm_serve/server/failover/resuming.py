"""Keeps a replica mute up to the byte that another one has delivered."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlm_serve.errors import OverloadedError
from vlm_serve.server.failover.attempt import FAILURE, Attempt, attempt_of
from vlm_serve.server.http.errors import error_for

_log = logging.getLogger(__name__)

MOST_DEATHS = 1
"""A request that was running when two replicas died may be what has killed them."""


class Resuming:
    """Answers an attempt that goes on with another one's answer as if it were the same one. A plain
    ASGI layer; requests that are no such attempt pass through it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        attempt = attempt_of(scope)
        if attempt is not None and attempt.deaths > MOST_DEATHS:
            refusal = OverloadedError(
                "two replicas ended while they answered this request: it is not tried again",
                code="resumed_twice",
            )
            await error_for(scope, refusal)(scope, receive, send)
        elif attempt is not None and attempt.resumed:
            await self._app(scope, receive, _Mute(attempt, send))
        else:
            await self._app(scope, receive, send)


class _Mute:
    """Sends what follows the delivered bytes.

    A response of another status than 200 is this replica's own refusal, which whoever asks learns
    of as it is. What a stream says of its failure is sent whole too: it stands wherever the replay
    has come to.
    """

    def __init__(self, attempt: Attempt, send: Send) -> None:
        self._attempt = attempt
        self._send = send
        self._left = attempt.delivered

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] != 200:
                self._left = 0
            elif self._attempt.started or self._attempt.delivered:
                return
        elif message["type"] == "http.response.body" and self._left:
            if message.get(FAILURE):
                self._left = 0
            message = self._rest_of(message)
            if not message["body"] and message.get("more_body", False):
                return
        await self._send(message)

    def _rest_of(self, message: Message) -> Message:
        body: bytes = message.get("body", b"")
        cut = min(len(body), self._left)
        self._left -= cut
        if self._left and not message.get("more_body", False):
            _log.error(
                "request %s was answered in %d bytes more the first time",
                self._attempt.request_id,
                self._left,
            )
        return {**message, "body": body[cut:]}
