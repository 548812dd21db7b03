"""What every HTTP request passes before its route: an id, the API key, and the access to errors.

A plain ASGI layer: it looks at the path as it came over the wire, before anything decodes it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.errors import AuthenticationError, error_for
from vlm_serve.server.http.request_id import request_id_of
from vlm_serve.server.http.static_page import StaticPage
from vlm_serve.server.http.tenants import bind

OPEN_PATHS = frozenset({b"/health", b"/ready", b"/metrics"})
"""Probes and scrapers bring no key; nothing that they read belongs to a client."""


class Gate:
    """Names every request, and lets only those in that bring a key, if there are keys.

    Args:
        app: what is behind it.
        api_keys: keys that are bound to nothing.
        tenants: further keys, each with its salt.
        open_paths: what can be had without a key, besides OPEN_PATHS.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Iterable[str],
        tenants: Mapping[str, str] | None = None,
        *,
        open_paths: Collection[bytes] = (),
    ) -> None:
        self._app = app
        self._open_paths = OPEN_PATHS.union(open_paths)
        salts: dict[str, str | None] = dict.fromkeys(api_keys)
        salts |= tenants or {}  # a key that is in both belongs to its tenant
        # Digests have one length, so comparing them tells nothing about the keys'.
        self._salts = {_digest(key.encode()): salt for key, salt in salts.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        if self._salts and not self._allowed(scope):
            refusal = AuthenticationError("a valid API key is needed", code="invalid_api_key")
            await error_for(scope, refusal)(scope, receive, named)
            return
        await self._app(scope, receive, named)

    def _allowed(self, scope: Scope) -> bool:
        if scope.get("raw_path") in self._open_paths:
            return True
        key = _key_of(scope)
        if key is None:
            return False
        digest = _digest(key)
        # No early end: the time must not tell which key was nearly right.
        found = [known for known in self._salts if hmac.compare_digest(digest, known)]
        if not found:
            return False
        bind(scope, found[0], self._salts[found[0]])
        return True


def guarded(app: ASGIApp, config: ServerConfig, tenants: Mapping[str, str] | None = None) -> Gate:
    """What answers, with the page before it and the gate before both, as the options say."""
    if not config.page:
        return Gate(app, config.api_key, tenants)
    page = StaticPage(app)
    return Gate(page, config.api_key, tenants, open_paths=page.paths)


def _key_of(scope: Scope) -> bytes | None:
    """The one key that a request brings, as a bearer token or as `x-api-key`; None if there is
    none, or more than one."""
    keys = []
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() != b"bearer":
                return None
            keys.append(key.strip())
    return keys[0] if len(keys) == 1 else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
