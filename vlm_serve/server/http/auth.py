"""Authentication: every HTTP request gets an id and needs an API key, if there are keys.

This is a plain ASGI layer: it checks the raw path, before anything decodes it.
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

OPEN_PATHS = frozenset({b"/health", b"/ready", b"/metrics", b"/ping"})
"""Paths for probes and scrapers without a key; they show no client's data."""


class Gate:
    """ASGI layer for request ids and API keys.

    Args:
        app: the application behind it.
        api_keys: keys without a cache salt.
        tenants: {further key: its cache salt}.
        open_paths: paths that need no key, besides OPEN_PATHS.
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
        salts |= tenants or {}  # a key in both is the tenant's
        # Digests have equal lengths, so comparing them reveals nothing about the keys' lengths.
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
            refusal = AuthenticationError(
                "a valid API key is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )
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
        # No early exit: the time must not reveal which key nearly matched.
        found = [known for known in self._salts if hmac.compare_digest(digest, known)]
        if not found:
            return False
        bind(scope, found[0], self._salts[found[0]])
        return True


def guarded(app: ASGIApp, config: ServerConfig, tenants: Mapping[str, str] | None = None) -> Gate:
    """Return the application behind the page and authentication, as configured."""
    if not config.page:
        return Gate(app, config.api_key, tenants)
    page = StaticPage(app)
    return Gate(page, config.api_key, tenants, open_paths=page.paths)


def _key_of(scope: Scope) -> bytes | None:
    """Return a request's API key, from `authorization: bearer` or `x-api-key`.

    Return None if there is no key or more than one.
    """
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
