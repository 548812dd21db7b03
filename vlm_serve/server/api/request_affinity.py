"""Affinity keys of requests: set by a deployment's gateway, or computed from the parsed body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.affinity import AffinityKey, affinity_keys_of_body
from vlm_serve.server.http.tenants import salt_of

AFFINITY = "vlm_serve.affinity"
"""Key of the ASGI scope, where no client can write."""

APIS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/inference/v1/generate": "generate",
}


def note_affinity(scope: Scope, body: Mapping[str, Any], model: str) -> None:
    """Store a parsed body's affinity keys in the request's scope, unless it has some already.

    It takes time in proportion to the body.

    Args:
        scope: the request's ASGI scope.
        model: the canonical name of the model that answers.
    """
    api = APIS.get(scope.get("path", ""))
    if api is None or AFFINITY in scope:
        return
    salt = body.get("cache_salt") if isinstance(body, dict) else None
    try:
        salt = salt_of(scope, salt if isinstance(salt, str) else None)
    except InvalidRequestError:
        return  # The route raises it again.
    scope[AFFINITY] = affinity_keys_of_body(api, body, salt=salt, model=model)


def affinity_of(scope: Scope) -> tuple[AffinityKey, ...]:
    """Return the keys of a request, the longest prefix first."""
    keys: tuple[AffinityKey, ...] = scope.get(AFFINITY, ())
    return keys
