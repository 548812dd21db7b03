"""Ranks replicas for a request: our router, fed with the replicas' statistics from Serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlm_serve.routing.router import Router
from vlm_serve.routing.view import ReplicaView, RequestUsage


class ReplicaRanker:
    """Weighs where a request's prefix may be cached against the replicas' load.

    Replicas are known by name; keys are affinity keys, longest prefix first.
    """

    def __init__(self) -> None:
        self._router = Router()
        self._loads: dict[str, float] = {}
        self._versions: dict[str, int] = {}

    def choose(self, keys: Sequence[bytes], tokens: int, names: Sequence[str]) -> list[str]:
        """Rank all of the names, best first. `tokens` is the prompt's length, 0 if unknown."""
        views = [ReplicaView(name, self._loads.get(name, 0.0)) for name in names]
        return self._router.choose(keys, tokens, views)

    def sent(self, name: str, keys: Sequence[bytes], tokens: int) -> None:
        """Count a request as sent to a replica."""
        self._router.sent(name, keys, tokens)

    def ended(
        self, name: str, keys: Sequence[bytes], tokens: int, usage: RequestUsage | None = None
    ) -> None:
        """Count a request as ended, with its usage if known."""
        self._router.ended(name, keys, tokens, usage)

    def update(self, name: str, stats: Mapping[str, Any]) -> None:
        """Update a replica's statistics: `load`, and optionally `digest`."""
        self._loads[name] = float(stats.get("load", 0.0))
        digest = stats.get("digest")
        if digest is not None and self._versions.get(name) != digest.version:
            self._versions[name] = digest.version
            self._router.digest(name, digest)

    def removed(self, name: str) -> None:
        """Forget a replica."""
        self._loads.pop(name, None)
        self._versions.pop(name, None)
        self._router.removed(name)
