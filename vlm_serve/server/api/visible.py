"""Which part of the cache a client sees: a tenant its own, everybody else all of it."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request

from vlm_serve.cache.listing import ListedNode
from vlm_serve.server.http.tenants import is_tenant, salt_of
from vlm_serve.server.service import Service


class VisibleRoots:
    """Root keys below which a client sees the cache: of its salt, without an adapter and with each
    served one. An adapter that leaves while this lives stays visible, as its nodes do.

    Attributes:
        everything: the client sees all nodes.
        owner: the root without an adapter, which owns the client's pins; None: those of all.
    """

    def __init__(self, service: Service, request: Request) -> None:
        self.everything = not is_tenant(request.scope)
        self.owner: bytes | None = None
        self._adapters = service.engine.adapters
        self._preprocessor = service.engine.preprocessor
        self._known: dict[str, bytes] = {}
        if not self.everything:
            self._salt = salt_of(request.scope, None)
            self.owner = self._known[""] = self._preprocessor.root_key(self._salt)

    def __contains__(self, root: object) -> bool:
        return self.everything or root in self._known.values()

    def refresh(self) -> VisibleRoots:
        """Add the roots of adapters that were loaded since."""
        for served in () if self.everything else self._adapters.all():
            digest = served.identity.whole
            if digest not in self._known:
                self._known[digest] = self._preprocessor.root_key(self._salt, digest)
        return self

    def below(self, entries: Sequence[ListedNode]) -> Sequence[ListedNode]:
        """Return the visible ones of some nodes."""
        if self.everything:
            return entries
        roots = frozenset(self._known.values())
        return [entry for entry in entries if entry.root in roots]


def pin_owner(service: Service, request: Request) -> bytes | None:
    """Return the owner of a client's pins, see `VisibleRoots`."""
    return VisibleRoots(service, request).owner


def visible_roots(service: Service, request: Request) -> VisibleRoots:
    """Return what a client sees now."""
    return VisibleRoots(service, request).refresh()
