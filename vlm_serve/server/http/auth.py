"""Authentication: every HTTP request gets an id and needs an API key, if there are keys.

Tenants have API keys with a bound cache salt. The gate is a plain ASGI layer: it checks the raw
path, before anything decodes it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlm_serve.engine.requests.tenant import NOBODY, Tenant
from vlm_serve.errors import InvalidRequestError
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.errors import AuthenticationError, PermissionDeniedError, error_for
from vlm_serve.server.http.request_id import request_id_of
from vlm_serve.server.http.static_page import StaticPage
from vlm_serve.server.http.tenants import (
    TENANT_STATE,
    TenantKey,
    tenant_at,
    tenant_of,
    tenants_of_keys,
)

OPEN_PATHS = frozenset({b"/health", b"/ready", b"/metrics", b"/ping"})
"""Paths for probes and scrapers without a key; they show no client's data."""

RESERVED_PREFIX = "tenant:"
"""Prefix of bound salts. Clients' own salts must not have it, so none can name a tenant's salt."""
_STATE = "tenant_salt"
_KEY = "api_key_digest"


class Gate:
    """ASGI layer for request ids and API keys.

    Args:
        app: the application behind it.
        api_keys: keys without a cache salt.
        tenants: {further key: its cache salt and weight}.
        open_paths: paths that need no key, besides OPEN_PATHS.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Iterable[str],
        tenants: Mapping[str, TenantKey] | None = None,
        *,
        open_paths: Collection[bytes] = (),
    ) -> None:
        self._app = app
        self._open_paths = OPEN_PATHS.union(open_paths)
        bound = tenants or {}  # a key in both is the tenant's
        # Digests have equal lengths, so comparing them reveals nothing about the keys' lengths.
        self._known = {
            _digest(key.encode()): (bound[key].salt if key in bound else None, tenant)
            for key, tenant in tenants_of_keys(api_keys, bound).items()
        }

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

        if not self._known:
            bind(scope, b"", None, tenant_at(scope.get("client")))
        elif not self._allowed(scope):
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
        matches = [known for known in self._known if hmac.compare_digest(digest, known)]
        if not matches:
            return False
        bind(scope, matches[0], *self._known[matches[0]])
        return True


def guarded(
    app: ASGIApp, config: ServerConfig, tenants: Mapping[str, TenantKey] | None = None
) -> Gate:
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


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of stored responses.

    Attributes:
        key: digest of the API key; empty if the server has none.
        salt: cache salt of the requests.
        tenant: whom further requests for it count for.
    """

    key: bytes
    salt: str
    tenant: Tenant = field(default=NOBODY, compare=False)


def bind(scope: Any, key: bytes, salt: str | None, tenant: Tenant) -> None:
    """Store the digest of a request's API key, empty if the server has none, the key's salt if it
    has one, and the tenant in its scope."""
    state = scope.setdefault("state", {})
    state[_KEY], state[TENANT_STATE] = key, tenant
    if salt is not None:
        state[_STATE] = salt


def state_of(owner: Owner) -> dict[str, Any]:
    """Return the state of a scope whose request has that owner, as `bind` leaves it."""
    scope: dict[str, Any] = {}
    bound = owner.salt.startswith(RESERVED_PREFIX)
    salt = owner.salt.removeprefix(RESERVED_PREFIX) if bound else None
    bind(scope, owner.key, salt, owner.tenant)
    state: dict[str, Any] = scope["state"]
    return state


def owner_of(scope: Any, client_salt: str | None) -> Owner:
    """Return the owner of a request's stored responses; it raises as `salt_of` does."""
    key = scope.get("state", {}).get(_KEY, b"")
    return Owner(key, salt_of(scope, client_salt), tenant_of(scope))


def share_of(scope: Any) -> bytes:
    """Return what has a share of every bounded place: the digest of the request's API key.

    It is empty if the server has no keys. Salts chosen by clients get no shares of their own.
    """
    key: bytes = scope.get("state", {}).get(_KEY, b"")
    return key


def salt_of(scope: Any, client_salt: str | None) -> str:
    """Return the cache salt of a request: its API key's if one is bound to it, else the client's.

    Raises:
        InvalidRequestError: only the operator may give such a salt.
    """
    bound = scope.get("state", {}).get(_STATE)
    if bound is not None:
        return f"{RESERVED_PREFIX}{bound}"
    if client_salt is not None and client_salt.startswith(RESERVED_PREFIX):
        raise InvalidRequestError(
            f"cache_salt must not begin with {RESERVED_PREFIX}", param="cache_salt"
        )
    return client_salt or ""


def is_tenant(scope: Any) -> bool:
    """Return True if the request's API key is bound to a salt."""
    return _STATE in scope.get("state", {})


def refuse_tenants(scope: Any) -> None:
    """Refuse a tenant's request for something that concerns all tenants.

    Raises:
        PermissionDeniedError: the request comes from a tenant.
    """
    if is_tenant(scope):
        raise PermissionDeniedError("this API key may not do that", code="tenant_key")
