"""Tenants: API keys with a bound cache salt."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from vlm_serve.errors import ConfigError, InvalidRequestError, VlmServeError
from vlm_serve.options.declared import read_mapping

RESERVED_PREFIX = "tenant:"
"""Prefix of bound salts. Clients' own salts must not have it, so none can name a tenant's salt."""

_SALT = re.compile(r"[A-Za-z0-9._:=+/@-]{1,100}", re.ASCII)
_STATE = "tenant_salt"
_KEY = "api_key_digest"


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of stored responses.

    Attributes:
        key: digest of the API key; empty if the server has none.
        salt: cache salt of the requests.
    """

    key: bytes
    salt: str


class PermissionDeniedError(VlmServeError):
    """Such a client may not do this, whatever its request says: HTTP 403."""

    status = 403
    type = "permission_error"


def read_tenant_keys(path: str | None) -> dict[str, str]:
    """Return {API key: salt} from a YAML file.

    Raises:
        ConfigError: the file is bad. The message never contains a key.
    """
    if path is None:
        return {}
    place, expected = f"tenant_keys {path}", "it must map keys to salts"
    content = read_mapping(path, place, "tenant_keys", expected)
    if not content:
        raise ConfigError(f"{place}: {expected}", param="tenant_keys")
    for number, (key, salt) in enumerate(content.items(), start=1):
        if not (isinstance(key, str) and key and isinstance(salt, str) and _SALT.fullmatch(salt)):
            raise ConfigError(
                f"tenant_keys {path}: entry {number} must map a text to a salt of at most 100 "
                "letters, digits or ._:=+/@- (numbers need quotes)",
                param="tenant_keys",
            )
    return content


def bind(scope: Any, key: bytes, salt: str | None) -> None:
    """Store the digest of a request's API key, and the key's salt if it has one, in its scope."""
    state = scope.setdefault("state", {})
    state[_KEY] = key
    if salt is not None:
        state[_STATE] = salt


def state_of(owner: Owner) -> dict[str, Any]:
    """Return the state of a scope whose request has that owner, as `bind` leaves it."""
    scope: dict[str, Any] = {}
    tenant = owner.salt.startswith(RESERVED_PREFIX)
    bind(scope, owner.key, owner.salt.removeprefix(RESERVED_PREFIX) if tenant else None)
    state: dict[str, Any] = scope["state"]
    return state


def owner_of(scope: Any, client_salt: str | None) -> Owner:
    """Return the owner of a request's stored responses; it raises as `salt_of` does."""
    return Owner(scope.get("state", {}).get(_KEY, b""), salt_of(scope, client_salt))


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
