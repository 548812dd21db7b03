"""Answering attempts: the layer that only servers with a gateway before them have."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlm_serve.errors import OverloadedError, VlmServeError
from vlm_serve.server.failover.attempt import FAILURE, PING, Attempt, attempt_of

_log = logging.getLogger(__name__)

MOST_DEATHS = 1
"""A request that ran on two replicas when they died may have killed them."""


class Resuming:
    """ASGI layer of a replica for attempts: a resumed answer continues the delivered bytes.

    Other requests pass through it.

    Args:
        app: the application behind it.
        error_response: makes the response of an error in the form of the request's route.
    """

    def __init__(
        self, app: ASGIApp, error_response: Callable[[Scope, VlmServeError], Response]
    ) -> None:
        self._app = app
        self._error_response = error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        attempt = attempt_of(scope)
        if attempt is None:
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["request_id"] = attempt.request_id
        if attempt.deaths > MOST_DEATHS:
            refusal = OverloadedError(
                "two replicas ended while they answered this request: it is not tried again",
                code="resumed_twice",
            )
            await self._error_response(scope, refusal)(scope, receive, send)
        else:
            passed = _SkipDelivered(attempt, send) if attempt.resumed else send
            await self._app(scope, receive, passed)


class _SkipDelivered:
    """Sends the bytes after those already delivered.

    A response with another status than 200 is this replica's own refusal: it is sent whole. So are
    reports of a stream's failure, however far the replay has come.
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
        elif message["type"] == "http.response.body" and self._left and not message.get(PING):
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
                "request %s: the first answer was %d bytes longer than the resumed one",
                self._attempt.request_id,
                self._left,
            )
        return {**message, "body": body[cut:]}
