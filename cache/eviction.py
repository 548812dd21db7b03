"""Choose victims: the block or row to evict when none is free (docs/architecture.md#state)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlm_serve.cache.ledger import WORTHLESS

if TYPE_CHECKING:
    from vlm_serve.cache.ledger import Ledger
    from vlm_serve.cache.records import Block
    from vlm_serve.cache.suspension import Suspensions


class Evictor:
    """Frees blocks and rows that no running request needs.

    Order of blocks: KV beyond the last snapshot of its path, then suspended requests, then the rest
    by value. Order of rows: suspended requests, then snapshots by value.
    """

    def __init__(self, ledger: Ledger, suspensions: Suspensions) -> None:
        self._ledger = ledger
        self._suspensions = suspensions

    def make_blocks(self, count: int) -> bool:
        """Evict until `count` blocks are free; return False, without any change, if that is
        impossible."""
        blocks = self._ledger.blocks
        if count > blocks.num_free + blocks.num_reclaimable:
            return False
        while blocks.num_free < count:
            self._free_some_block()
        return True

    @property
    def can_make_row(self) -> bool:
        ledger = self._ledger
        return bool(ledger.rows.num_free or self._suspensions.leases or len(ledger.spare_snapshots))

    def make_row(self, worth: float | None = None) -> bool:
        """Evict until a row is free; return False, without any change, if that is impossible.

        Args:
            worth: evict only a snapshot without value, or of less than a new one that saves so many
                tokens, times its expected uses; None: any, and suspended requests too.
        """
        ledger = self._ledger
        if ledger.rows.num_free or (worth is None and self._suspensions.evict_oldest()):
            return True
        spare = ledger.spare_snapshots.cheapest()
        if spare is None:
            return False
        # What is worth nothing gives way to anything.
        if worth is not None and 0 < spare[0] >= ledger.spare_snapshots.new_value(worth):
            return False
        snapshot = spare[1]
        heir = snapshot.pass_on()
        if heir is not None:
            ledger.refresh_snapshot(heir)
        ledger.remove_snapshot(snapshot)
        return True

    def evict_everything(self) -> None:
        """Evict everything that no running request needs."""
        ledger = self._ledger
        while self._suspensions.evict_oldest():
            pass
        while (unit := ledger.units.peek()) is not None:
            self._evict_unit(unit[1])
        for snapshot in ledger.spare_snapshots:
            ledger.remove_snapshot(snapshot)

    def _free_some_block(self) -> None:
        """Evict one candidate, as a step towards a free block."""
        unit = self._ledger.units.cheapest(self._ledger.unit_priority)
        if (unit is None or unit[0][0] != WORTHLESS) and self._suspensions.evict_oldest():
            return
        assert unit is not None, "reclaimable blocks without a candidate"
        (_, value, _), block = unit
        self._ledger.age = max(self._ledger.age, value)
        self._evict_unit(block)

    def _evict_unit(self, block: Block) -> None:
        """Evict every node on a block, which frees it."""
        for node in block.nodes:
            self._ledger.remove_node(node)
