"""The id of a request in responses, headers and logs, and its trace context."""

from __future__ import annotations

import re
import secrets
from typing import Any

_PLAIN = re.compile(r"[A-Za-z0-9_.:-]{1,128}", re.ASCII)
"""A client's id that may be used in headers and logs."""


def request_id_of(scope: Any) -> str:
    """Return the id of the request with this ASGI scope, the same on every call.

    It is the attempt's id (`failover.resuming` sets it), or else the client's X-Request-Id if that
    is plain, or else a new one.
    """
    state = scope.setdefault("state", {})
    if "request_id" not in state:
        given = next((v for k, v in scope.get("headers", ()) if k == b"x-request-id"), b"")
        text = given.decode("latin-1")
        state["request_id"] = text if _PLAIN.fullmatch(text) else secrets.token_hex(12)
    return str(state["request_id"])


def trace_context_of(scope: Any) -> dict[str, str]:
    """Return the W3C trace headers of the request with this ASGI scope."""
    return {
        name.decode(): value.decode("latin-1")
        for name, value in scope.get("headers", ())
        if name in (b"traceparent", b"tracestate")
    }
