"""The part of a request's ASGI scope for replicas."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

STATE = ("request_id", "tenant_salt", "api_key_digest")
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
