"""Tenants of random traffic, and clients that read late."""

from __future__ import annotations

import random
from collections.abc import Iterable

from simulated_client import Client

from vlm_serve.engine.features.unread import Unread
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.engine.requests.tenant import Tenant


class Tenants:
    """Whom requests count for, and which clients read; from one seed.

    Attributes:
        num_held: how often a client has read too little.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"tenants {seed}")
        count = self._rng.choice([1, 2, 4])
        self._all = [Tenant(f"t{each}", self._rng.choice([1, 1, 3])) for each in range(count)]
        self._late = self._rng.choice([0.0, 0.0, 0.05])
        self.num_held = 0

    def take(self) -> Tenant:
        return self._rng.choice(self._all)

    def read(self, unread: Unread | None, groups: list[SequenceGroup]) -> None:
        """Some clients stop to read, others begin again."""
        if unread is None or not groups or self._rng.random() >= 4 * self._late:
            return
        held = self._rng.random() < 0.25
        self.num_held += held
        unread.hold(self._rng.choice(groups), held=held)

    def read_all(self, unread: Unread | None, clients: Iterable[Client]) -> None:
        for client in clients if unread is not None else ():
            assert unread is not None
            unread.hold(client.group, held=False)
