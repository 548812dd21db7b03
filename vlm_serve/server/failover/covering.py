"""Says with every message of an answer which tokens its bytes cover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from vlm_serve.engine.outputs import Delta
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.failover.attempt import FAILURE, REPORT, TOKENS, USAGE
from vlm_serve.server.failover.attempt_part import report_fields


class Cover:
    """Gathers what the next message covers, if the request is an attempt; else nothing.

    A token counts as covered with the first bytes that are sent once it is there, though it may
    have got none of its own yet: what has been delivered then never depends on other tokens.
    """

    def __init__(self) -> None:
        self._generations: Sequence[Generation] = ()
        self._tokens: dict[int, list[int]] = {}
        self._told: list[int] = []
        self._failed = False

    def begin(self, generations: Sequence[Generation]) -> None:
        """These are the request's."""
        if all(generation.part is not None for generation in generations):
            self._generations = generations

    def add(self, prompt: int, delta: Delta) -> None:
        """A delta is about to be told of."""
        if self._generations:
            choice = prompt * self._generations[prompt].task.params.n + delta.index
            self._tokens.setdefault(choice, []).extend(delta.token_ids)

    def fail(self) -> None:
        """What is told next is a failure."""
        self._failed = bool(self._generations)

    def take(self) -> Mapping[str, Any]:
        """What goes with the message that is sent now."""
        extra: dict[str, Any] = {}
        if self._tokens:
            extra[TOKENS], self._tokens = self._tokens, {}
            parts = [generation.part for generation in self._generations]
            counted = [part.counted if part is not None else None for part in parts]
            reports = [part.report if part is not None else None for part in parts]
            extra[USAGE] = tuple(None if each is None else asdict(each) for each in counted)
            if self._told != list(map(id, reports)):
                extra[REPORT] = tuple(map(report_fields, reports))
                self._told = list(map(id, reports))
        if self._failed:
            extra[FAILURE] = True
        return extra


class CoveredResponse(Response):
    """A whole answer in JSON, and what it covers."""

    media_type = "application/json"

    def __init__(self, content: str, headers: Mapping[str, str], extra: Mapping[str, Any]) -> None:
        super().__init__(content, headers=dict(headers))
        self._extra = extra

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def covered(message: Message) -> None:
            body = message["type"] == "http.response.body"
            await send({**message, **self._extra} if body else message)

        await super().__call__(scope, receive, covered)
