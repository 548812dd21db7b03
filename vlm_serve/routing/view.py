"""A replica as a router is told of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica that may be chosen.

    Attributes:
        id: names it, the same in every router.
        load: tokens queued and running there, as last reported.
    """

    id: str
    load: float = 0.0
