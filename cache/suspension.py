"""The remains of a preempted request, until it resumes or its space is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlm_serve.cache.pools import RowState
from vlm_serve.cache.publishing import LeftState, give_row
from vlm_serve.cache.records import Block, Lease, LeaseState

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlm_serve.cache.ledger import Ledger


_ROWS = {
    LeaseState.OPEN: RowState.LIVE,
    LeaseState.SUSPENDED: RowState.PRIVATE,
    LeaseState.CLOSED: RowState.FREE,
}
"""The state of a lease's row."""


def change_holds(
    ledger: Ledger,
    lease: Lease,
    change_block: Callable[[Block], None],
    state: LeaseState,
) -> None:
    """Move a lease to another state, with all that it holds.

    Args:
        change_block: changes its hold on an own block.
    """
    pins = (state is LeaseState.OPEN) - (lease.state is LeaseState.OPEN)
    parked = (state is LeaseState.SUSPENDED) - (lease.state is LeaseState.SUSPENDED)
    ledger.hold_path(lease.path, pins=pins, parked=parked)
    for block in lease.own_blocks:
        change_block(ledger.blocks[block])
    if lease.row >= 0:
        ledger.rows.change(lease.row, _ROWS[lease.state], _ROWS[state])
    lease.state = state


@dataclass(eq=False, slots=True)
class Suspended:
    """A private snapshot at the exact position, the private blocks, and their path.

    Only its own request can resume from it. It is evicted before anything else.
    """

    lease: Lease | None

    @property
    def valid(self) -> bool:
        """False once it was resumed, dropped or evicted."""
        return self.lease is not None

    @property
    def length(self) -> int:
        """Tokens computed, all of which `resume` returns; 0 if invalid."""
        return self.lease.length if self.lease is not None else 0


class Suspensions:
    """All suspended requests.

    Attributes:
        leases: theirs, oldest first.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.leases: dict[Suspended, Lease] = {}
        self._ledger = ledger

    def add(self, lease: Lease) -> Suspended:
        """Turn a running request's holds into ones that eviction may revoke."""
        ledger = self._ledger
        change_holds(ledger, lease, ledger.blocks.park, LeaseState.SUSPENDED)
        suspended = Suspended(lease)
        self.leases[suspended] = lease
        return suspended

    def resume(self, suspended: Suspended) -> Lease:
        """Reverse `add`."""
        ledger, lease = self._ledger, self.leases.pop(suspended)
        suspended.lease = None
        change_holds(ledger, lease, ledger.blocks.unpark, LeaseState.OPEN)
        return lease

    def drop(self, suspended: Suspended, left: LeftState | None = None) -> None:
        """Return all resources of a suspended request and invalidate it.

        Args:
            left: as for `PrefixCache.close`.
        """
        ledger, lease = self._ledger, self.leases.pop(suspended)
        suspended.lease = None
        if left is not None:
            give_row(ledger, lease, left)
        change_holds(ledger, lease, ledger.drop_parked_block, LeaseState.CLOSED)

    def evict_oldest(self) -> bool:
        """Drop the request that was suspended first: the scheduler preempts the least urgent
        request first."""
        if not self.leases:
            return False
        self.drop(next(iter(self.leases)))
        self._ledger.events.counted.publish(("evictions", "suspended"))
        return True
