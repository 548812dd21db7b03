"""An in-process client of the server's routes: requests pass the same checks as over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from vlm_serve.server.http.body import receiver


@dataclass(frozen=True, slots=True)
class Reply:
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
) -> Reply:
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
    return Reply(status, head, b"".join(parts))
