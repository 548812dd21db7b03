"""Requests as replicas get them, and replies as the gateway reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Scope

from vlm_serve.deploy.replica_pool import (
    BrokenAnswerError,
    ReplicaCall,
    ReplicaLostError,
    ReplicaPool,
)
from vlm_serve.errors import VlmServeError
from vlm_serve.server.http.tenants import TENANT_STATE

Replies = Mapping[str, Response]
"""Replies of the replicas that answered in time, by name."""
FAILURES = (ReplicaLostError, BrokenAnswerError, VlmServeError)
"""Errors that asking one replica may raise."""


async def replies_of(
    pool: ReplicaPool, call: ReplicaCall, names: Iterable[str], seconds: float | None = None
) -> Replies:
    """Send a request to several replicas; lost ones, and those that take longer, are left out."""

    async def one(name: str) -> tuple[str, Response] | None:
        try:
            async with asyncio.timeout(seconds):
                answers = pool.answers(replace(call, replica=name))
                return name, response_of([message async for message in answers])
        except (TimeoutError, *FAILURES):
            return None

    replies = await asyncio.gather(*map(one, names))
    return dict(named for named in replies if named is not None)


def response_of(messages: Sequence[Message]) -> Response:
    """Build a response from the messages of a whole answer."""
    head, *rest = messages
    body = b"".join(message.get("body", b"") for message in rest)
    answer = Response(body, head["status"])
    answer.raw_headers = list(head.get("headers", ()))
    return answer


def error_of(status: int, body: bytes) -> VlmServeError:
    """Return the error in a replica's reply."""
    told = json.loads(body)["error"]
    error = VlmServeError(told["message"], param=told.get("param"), code=told.get("code"))
    error.status, error.type = status, told["type"]
    return error


STATE = ("request_id", "tenant_salt", "api_key_digest", TENANT_STATE)
"""Set by the gateway's authentication; clients cannot set it."""
CREDENTIALS = (b"authorization", b"x-api-key")


def forwarded_scope(scope: Scope, query: bytes | None = None) -> dict[str, Any]:
    """Return a request's scope for a replica: plain data, without credentials."""
    state = scope.get("state", {})
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": scope["http_version"],
        "method": scope["method"],
        "scheme": scope["scheme"],
        "path": scope["path"],
        "raw_path": scope.get("raw_path", scope["path"].encode()),
        "root_path": "",
        "query_string": scope["query_string"] if query is None else query,
        "headers": [pair for pair in headers if pair[0] not in CREDENTIALS],
        "client": scope["client"],
        "server": scope["server"],
        "state": {name: state[name] for name in STATE if name in state},
    }
