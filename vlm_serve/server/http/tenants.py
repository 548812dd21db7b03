"""Tenants: API keys to which the operator has bound a cache salt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from vlm_serve.errors import ConfigError, InvalidRequestError, VlmServeError
from vlm_serve.server.response_store import Owner

RESERVED_PREFIX = "tenant:"
"""Bound salts get it, and clients' own must not have it: nobody can name another's salt."""

_SALT = re.compile(r"[A-Za-z0-9._:=+/@-]{1,100}", re.ASCII)
_STATE = "tenant_salt"
_KEY = "api_key_digest"


class PermissionDeniedError(VlmServeError):
    """The API key is known, but not for this: HTTP 403."""

    status = 403
    type = "permission_error"


def read_tenant_keys(path: str | None) -> dict[str, str]:
    """API key -> salt, from a YAML file that maps one to the other.

    Raises ConfigError that says what is wrong with the file; it never repeats a key.
    """
    if path is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not valid YAML"
        raise ConfigError(f"tenant_keys {path}: {reason}", param="tenant_keys") from None
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"tenant_keys {path}: it must map keys to salts", param="tenant_keys")
    for number, (key, salt) in enumerate(content.items(), start=1):
        if not (isinstance(key, str) and key and isinstance(salt, str) and _SALT.fullmatch(salt)):
            raise ConfigError(
                f"tenant_keys {path}: entry {number} must map a text to a salt of at most 100 "
                "letters, digits or ._:=+/@- (numbers need quotes)",
                param="tenant_keys",
            )
    return content


def bind(scope: Any, key: bytes, salt: str | None) -> None:
    """Notes whose request this is: the digest of its API key, and the salt that is bound to it."""
    state = scope.setdefault("state", {})
    state[_KEY] = key
    if salt is not None:
        state[_STATE] = salt


def owner_of(scope: Any, asked_salt: str | None) -> Owner:
    """Who owns what the request stores. Raises as `salt_of`."""
    return Owner(scope.get("state", {}).get(_KEY, b""), salt_of(scope, asked_salt))


def salt_of(scope: Any, asked: str | None) -> str:
    """The salt of a request: its key's, if one is bound to it, else the one that it asks for.

    Raises InvalidRequestError for a salt that only the operator can give.
    """
    bound = scope.get("state", {}).get(_STATE)
    if bound is not None:
        return f"{RESERVED_PREFIX}{bound}"
    if asked is not None and asked.startswith(RESERVED_PREFIX):
        raise InvalidRequestError(
            f"cache_salt must not begin with {RESERVED_PREFIX}", param="cache_salt"
        )
    return asked or ""


def is_tenant(scope: Any) -> bool:
    """Whether the request's key is bound to a salt."""
    return _STATE in scope.get("state", {})


def refuse_tenants(scope: Any) -> None:
    """For what concerns all tenants. Raises PermissionDeniedError if a tenant asks."""
    if is_tenant(scope):
        raise PermissionDeniedError("this API key may not do that", code="tenant_key")
