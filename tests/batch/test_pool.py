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
def test_a_line_is_tried_a_few_times(
    monkeypatch: pytest.MonkeyPatch, faults: int, status: int, asked: int
) -> None:
    """Its decoder was ended, say: the next try may do better, and the last one is the answer."""
    monkeypatch.setattr(pool, "_WAITS", (0.0,) * 4)
    calls = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(scope["path"])
        busy = len(calls) <= faults
        error = {"error": {"message": "try again", "code": None}}
        body = json.dumps(error if busy else {"id": "x"}).encode()
        start: dict[str, Any] = {
            "type": "http.response.start",
            "status": 503 if busy else 200,
            "headers": [],
        }
        await send(start)
        await send({"type": "http.response.body", "body": body})

    reply = asyncio.run(pool.post_patiently(app, "/v1/completions", b"{}"))
    assert (reply.status, len(calls)) == (status, asked)
