"""Attaching the covered tokens to every message of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from vlm_serve.engine.outputs import Delta
from vlm_serve.server.failover.attempt import FAILURE, REPORT, TOKENS, USAGE
from vlm_serve.server.failover.attempt_part import AttemptPart, report_fields


class Coverage:
    """Collects the tokens covered by the next message. It is empty unless the request is an
    attempt.

    A token counts as covered by the first bytes sent after it was generated, even if none of them
    are its own. So the delivered bytes never depend on undelivered tokens.
    """

    def __init__(self) -> None:
        self._parts: Sequence[AttemptPart] = ()
        self._tokens: dict[int, list[int]] = {}
        self._sent_reports: list[int] = []
        self._failed = False

    def begin(self, parts: Sequence[AttemptPart | None]) -> None:
        """Set the parts of the request's prompts; None: the request is not an attempt."""
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            self._parts = known

    def add(self, prompt: int, delta: Delta) -> None:
        """Add a delta of a prompt before it is turned into bytes."""
        if self._parts:
            choice = prompt * self._parts[prompt].choices + delta.index
            self._tokens.setdefault(choice, []).extend(delta.token_ids)

    def fail(self) -> None:
        """Mark the next messages as reports of a failure."""
        self._failed = bool(self._parts)

    def take(self) -> Mapping[str, Any]:
        """Return the extra fields of the next message."""
        extra: dict[str, Any] = {}
        if self._tokens:
            extra[TOKENS], self._tokens = self._tokens, {}
            counted = [part.counted for part in self._parts]
            reports = [part.report for part in self._parts]
            extra[USAGE] = tuple(None if each is None else asdict(each) for each in counted)
            if self._sent_reports != list(map(id, reports)):
                extra[REPORT] = tuple(map(report_fields, reports))
                self._sent_reports = list(map(id, reports))
        if self._failed:
            extra[FAILURE] = True
        return extra


class CoveredResponse(Response):
    """A whole answer in JSON with the fields of its coverage."""

    media_type = "application/json"

    def __init__(self, content: str, headers: Mapping[str, str], extra: Mapping[str, Any]) -> None:
        super().__init__(content, headers=dict(headers))
        self._extra = extra

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def covered(message: Message) -> None:
            body = message["type"] == "http.response.body"
            await send({**message, **self._extra} if body else message)

        await super().__call__(scope, receive, covered)
