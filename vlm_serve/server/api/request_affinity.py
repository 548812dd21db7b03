"""Affinity keys of requests: set by a deployment's gateway, or computed from the parsed body."""

from __future__ import annotations

from starlette.types import Scope

from vlm_serve.preprocess.affinity import AffinityKey, affinity_keys
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.reader import APIS
from vlm_serve.server.http.tenants import salt_of

AFFINITY = "vlm_serve.affinity"
"""Key of the ASGI scope, where no client can write."""


def note_affinity(scope: Scope, conversation: Conversation, model: str) -> None:
    """Store a conversation's affinity keys in the request's scope, unless it has some already.

    It takes time in proportion to the body.

    Args:
        scope: the request's ASGI scope.
        model: the canonical name of the model that answers, or its adapter's.
    """
    if AFFINITY in scope or scope.get("path", "") not in APIS:
        return
    salt = salt_of(scope, conversation.cache_salt)
    scope[AFFINITY] = affinity_keys(conversation, salt=salt, model=model)


def affinity_of(scope: Scope) -> tuple[AffinityKey, ...]:
    """Return the keys of a request, the longest prefix first."""
    keys: tuple[AffinityKey, ...] = scope.get(AFFINITY, ())
    return keys
