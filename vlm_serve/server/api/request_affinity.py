"""Affinity keys of requests: those that a front has set, or else made here from the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.affinity import AffinityKey, affinity_keys_of_body
from vlm_serve.server.http.tenants import salt_of

AFFINITY = "vlm_serve.affinity"
"""In a request's scope, where no client can write."""

_APIS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/inference/v1/generate": "generate",
}


def note_affinity(scope: Scope, body: Mapping[str, Any], model: str) -> None:
    """Leaves a parsed body's keys in the scope of its request, unless they are there: as slow as
    the body is long.

    Args:
        model: that answers, by its first name.
    """
    api = _APIS.get(scope.get("path", ""))
    if api is None or AFFINITY in scope:
        return
    asked = body.get("cache_salt") if isinstance(body, dict) else None
    try:
        salt = salt_of(scope, asked if isinstance(asked, str) else None)
    except InvalidRequestError:
        return  # whoever answers says so
    scope[AFFINITY] = affinity_keys_of_body(api, body, salt=salt, model=model)


def affinity_of(scope: Scope) -> tuple[AffinityKey, ...]:
    """The keys of a request, longest prefix first."""
    keys: tuple[AffinityKey, ...] = scope.get(AFFINITY, ())
    return keys
