"""Requests of a batch that the server cannot answer by its own fault."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from vlm_serve.batch import pool


@pytest.mark.parametrize(
    ("faults", "status", "asked"), [(0, 200, 1), (1, 200, 2), (3, 200, 4), (99, 503, 5)]
)
@pytest.mark.parametrize("code", [None, "aborted"])
def test_a_line_is_tried_a_few_times(
    monkeypatch: pytest.MonkeyPatch, faults: int, status: int, asked: int, code: str | None
) -> None:
    """Its decoder was ended, say, or a pause has ended it: the next try may do better, and the last
    one is the answer."""
    monkeypatch.setattr(pool, "_WAITS", (0.0,) * 4)
    assert posted([code] * faults) == (status, asked)


def test_a_line_waits_while_the_server_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_WAITS", ())
    monkeypatch.setattr(pool, "RETRY_SECONDS", 0.0)
    assert posted(["asleep"] * 50) == (200, 51)


def posted(codes: list[str | None]) -> tuple[int, int]:
    """Post to a route that answers with these faults first. Return the status of the reply, and how
    often it was asked."""
    calls = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(scope["path"])
        busy = len(calls) <= len(codes)
        error = {"error": {"message": "try again", "code": codes[len(calls) - 1]}} if busy else None
        start: dict[str, Any] = {
            "type": "http.response.start",
            "status": 503 if busy else 200,
            "headers": [],
        }
        await send(start)
        await send(
            {"type": "http.response.body", "body": json.dumps(error or {"id": "x"}).encode()}
        )

    reply = asyncio.run(pool.post_patiently(app, "/v1/completions", b"{}"))
    return reply.status, len(calls)
