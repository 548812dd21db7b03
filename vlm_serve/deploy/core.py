"""The order of replicas for a request. Without a router of affinity keys: in turn."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

try:
    from vlm_serve.routing.router import Router  # type: ignore[import-not-found]
    from vlm_serve.routing.view import ReplicaView  # type: ignore[import-not-found]
except ImportError:
    Router = None


class Core(Protocol):
    """What decides. Replicas go by their names; keys are affinity keys, longest prefix first."""

    def choose(self, keys: Sequence[bytes], tokens: int, names: Sequence[str]) -> list[str]:
        """All of the names, best first. `tokens` of the prompt; 0: unknown."""

    def sent(self, name: str, keys: Sequence[bytes], tokens: int) -> None:
        """A request was sent there."""

    def ended(self, name: str, keys: Sequence[bytes], tokens: int) -> None:
        """It has ended."""

    def heard(self, name: str, stats: Mapping[str, Any]) -> None:
        """What a replica says of itself: `load`, and maybe `digest`."""

    def removed(self, name: str) -> None:
        """A replica has gone."""


class InTurn:
    """One after the other."""

    def __init__(self) -> None:
        self._turn = itertools.count()

    def choose(self, keys: Sequence[bytes], tokens: int, names: Sequence[str]) -> list[str]:
        ordered = sorted(names)
        first = next(self._turn) % max(1, len(ordered))
        return ordered[first:] + ordered[:first]

    def sent(self, name: str, keys: Sequence[bytes], tokens: int) -> None:
        pass

    def ended(self, name: str, keys: Sequence[bytes], tokens: int) -> None:
        pass

    def heard(self, name: str, stats: Mapping[str, Any]) -> None:
        pass

    def removed(self, name: str) -> None:
        pass


class ByAffinity:
    """Where a request's beginning may be cached, against what replicas have to do."""

    def __init__(self) -> None:
        self._router = Router()
        self._loads: dict[str, float] = {}
        self._versions: dict[str, int] = {}

    def choose(self, keys: Sequence[bytes], tokens: int, names: Sequence[str]) -> list[str]:
        views = [ReplicaView(name, self._loads.get(name, 0.0)) for name in names]
        return list(self._router.choose(keys, tokens, views))

    def sent(self, name: str, keys: Sequence[bytes], tokens: int) -> None:
        self._router.sent(name, keys, tokens)

    def ended(self, name: str, keys: Sequence[bytes], tokens: int) -> None:
        self._router.ended(name, keys, tokens)

    def heard(self, name: str, stats: Mapping[str, Any]) -> None:
        self._loads[name] = float(stats.get("load", 0.0))
        digest = stats.get("digest")
        if digest is not None and self._versions.get(name) != digest.version:
            self._versions[name] = digest.version
            self._router.digest(name, digest)

    def removed(self, name: str) -> None:
        self._loads.pop(name, None)
        self._versions.pop(name, None)
        self._router.removed(name)


def make_core() -> Core:
    """Of one router."""
    return InTurn() if Router is None else ByAffinity()
