"""The order of replicas for a request: our router, fed with what replicas say through Serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlm_serve.routing.router import Router
from vlm_serve.routing.view import ReplicaView, Spent


class Core:
    """Where a request's beginning may be cached, against what replicas have to do. Replicas go by
    their names; keys are affinity keys, longest prefix first."""

    def __init__(self) -> None:
        self._router = Router()
        self._loads: dict[str, float] = {}
        self._versions: dict[str, int] = {}

    def choose(self, keys: Sequence[bytes], tokens: int, names: Sequence[str]) -> list[str]:
        """All of the names, best first. `tokens` of the prompt; 0: unknown."""
        views = [ReplicaView(name, self._loads.get(name, 0.0)) for name in names]
        return self._router.choose(keys, tokens, views)

    def sent(self, name: str, keys: Sequence[bytes], tokens: int) -> None:
        """A request was sent there."""
        self._router.sent(name, keys, tokens)

    def ended(
        self, name: str, keys: Sequence[bytes], tokens: int, spent: Spent | None = None
    ) -> None:
        """It has ended, and has turned out to be `spent`, if that is known."""
        self._router.ended(name, keys, tokens, spent)

    def heard(self, name: str, stats: Mapping[str, Any]) -> None:
        """What a replica says of itself: `load`, and maybe `digest`."""
        self._loads[name] = float(stats.get("load", 0.0))
        digest = stats.get("digest")
        if digest is not None and self._versions.get(name) != digest.version:
            self._versions[name] = digest.version
            self._router.digest(name, digest)

    def removed(self, name: str) -> None:
        """A replica has gone."""
        self._loads.pop(name, None)
        self._versions.pop(name, None)
        self._router.removed(name)
