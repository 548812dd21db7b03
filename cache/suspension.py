"""The remains of a preempted request, until it resumes or its space is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlm_serve.cache.pools import RowState
from vlm_serve.cache.publishing import LeftState, give_row
from vlm_serve.cache.records import Lease, LeaseState

if TYPE_CHECKING:
    from vlm_serve.cache.ledger import Ledger


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
        for node in lease.path:
            ledger.park(node)
        for block in lease.own_blocks:
            ledger.blocks.park(ledger.blocks[block])
        if lease.row >= 0:
            ledger.rows.change(lease.row, RowState.LIVE, RowState.PRIVATE)
        lease.state = LeaseState.SUSPENDED
        suspended = Suspended(lease)
        self.leases[suspended] = lease
        return suspended

    def resume(self, suspended: Suspended) -> Lease:
        """Reverse `add`."""
        ledger = self._ledger
        lease = self.leases.pop(suspended)
        suspended.lease = None
        for node in lease.path:
            ledger.unpark(node)
        for block in lease.own_blocks:
            ledger.blocks.unpark(ledger.blocks[block])
        if lease.row >= 0:
            ledger.rows.change(lease.row, RowState.PRIVATE, RowState.LIVE)
        lease.state = LeaseState.OPEN
        return lease

    def drop(self, suspended: Suspended, left: LeftState | None = None) -> None:
        """Return all resources of a suspended request and invalidate it.

        Args:
            left: as for `PrefixCache.close`.
        """
        ledger = self._ledger
        lease = self.leases.pop(suspended)
        suspended.lease = None
        if left is not None:
            give_row(ledger, lease, left)
        for node in reversed(lease.path):
            ledger.drop_parked(node)
        for block in lease.own_blocks:
            ledger.drop_parked_block(ledger.blocks[block])
        if lease.row >= 0:
            ledger.rows.change(lease.row, RowState.PRIVATE, RowState.FREE)
        lease.state = LeaseState.CLOSED

    def evict_oldest(self) -> bool:
        """Drop the request that was suspended first: the scheduler preempts the least urgent
        request first."""
        if not self.leases:
            return False
        self.drop(next(iter(self.leases)))
        self._ledger.events.counted.publish(("evictions", "suspended"))
        return True
