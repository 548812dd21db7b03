"""The pools: physical KV blocks with their holders, and state rows, live ones and snapshots."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from vlm_serve.cache.records import Block, Holds, Node

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt


class BlockPool:
    """Free list and holder counts.

    Attributes:
        blocks: every block by id.
        num_reclaimable: blocks that no running request needs, so that evicting nodes and suspended
            requests can free them.
        num_touched: blocks that have been taken at least once: their pages stay with the process.
    """

    def __init__(self, num_blocks: int, on_free: Callable[[int], None] | None = None) -> None:
        self._holds = holds = Holds(num_blocks)
        self.blocks = [Block(block_id, holds) for block_id in range(num_blocks)]
        self.num_reclaimable = 0
        self.num_touched = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._on_free = on_free

    def __getitem__(self, block_id: int) -> Block:
        return self.blocks[block_id]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_ids(self) -> tuple[int, ...]:
        return tuple(self._free)

    def take(self) -> Block:
        """Return a free block, held once by a running request."""
        block = self.blocks[self._free.pop()]
        self.num_touched = max(self.num_touched, block.id + 1)
        self._holds.hard[block.id] = 1
        return block

    def untouch(self) -> None:
        """Note that no block has pages; all are free."""
        self.num_touched, self._free = 0, sorted(self._free, reverse=True)
        assert len(self._free) == len(self.blocks)

    def harden(self, block: Block) -> None:
        """Add a running request's hold on the block, or its pin of a node there."""
        if block.hard == 0 and (block.soft or block.nodes):
            self.num_reclaimable -= 1
        self._holds.hard[block.id] += 1

    def loosen(self, block: Block) -> None:
        """Remove a running request's hold; the block is freed if nothing else holds it."""
        assert block.hard > 0, f"block {block.id} let go twice"
        self._holds.hard[block.id] -= 1
        if block.hard == 0:
            if block.soft or block.nodes:
                self.num_reclaimable += 1
            else:
                self._release(block)

    def park(self, block: Block) -> None:
        """Turn a running request's hold into a suspended one's."""
        self._holds.soft[block.id] += 1
        self.loosen(block)

    def unpark(self, block: Block) -> None:
        """Turn a suspended request's hold into a running one's."""
        assert block.soft > 0, f"block {block.id} is not parked"
        self.harden(block)
        self._holds.soft[block.id] -= 1

    def drop_parked(self, block: Block) -> None:
        """Remove a suspended request's hold."""
        assert block.soft > 0, f"block {block.id} let go twice"
        self._holds.soft[block.id] -= 1
        self._settle(block)

    def hold_path(self, blocks: npt.NDArray[np.int32], *, hard: int, soft: int) -> None:
        """Change the holds of a path's blocks, which its nodes keep from being freed.

        Args:
            blocks: their ids, each once.
            hard, soft: added to the holds of running and of suspended requests.
        """
        holds = self._holds
        before = np.count_nonzero(holds.hard[blocks] == 0)
        holds.hard[blocks] += hard
        holds.soft[blocks] += soft
        self.num_reclaimable += int(np.count_nonzero(holds.hard[blocks] == 0) - before)

    def attach(self, block: Block, node: Node) -> None:
        """Record a node published on a block that a running request holds."""
        assert block.hard > 0, "only a held block can be published"
        block.nodes = (*block.nodes, node)

    def detach(self, block: Block, node: Node) -> None:
        """Remove a node that leaves the trie."""
        assert node in block.nodes, f"block {block.id} does not hold this node"
        block.nodes = tuple(other for other in block.nodes if other is not node)
        self._settle(block)

    def _settle(self, block: Block) -> None:
        """Free a block after its last soft hold or node is gone."""
        if block.hard == 0 and not block.soft and not block.nodes:
            self.num_reclaimable -= 1
            self._release(block)

    def _release(self, block: Block) -> None:
        self._free.append(block.id)
        if self._on_free is not None:
            self._on_free(block.id)


class RowState(Enum):
    """FREE -> LIVE -> FREE for a running request; FREE -> RESERVED -> READY -> FREE for a snapshot.

    The live row of a request that ends at a cut point may become RESERVED, and so a snapshot.
    PRIVATE is the row of a suspended request: LIVE -> PRIVATE -> LIVE, or FREE.
    """

    FREE = "free"
    LIVE = "live"
    RESERVED = "reserved"
    READY = "ready"
    PRIVATE = "private"


class RowPool:
    """Free list and the state of every row.

    Attributes:
        num_touched: rows that have been taken at least once: their pages stay with the process.
    """

    def __init__(
        self, num_rows: int, num_live_rows: int, on_free: Callable[[int], None] | None = None
    ) -> None:
        self.states = [RowState.FREE] * num_rows
        self.num_live_rows = num_live_rows
        self.num_live = 0
        self.num_touched = 0
        self._free = list(range(num_rows - 1, -1, -1))
        self._on_free = on_free

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_rows(self) -> tuple[int, ...]:
        return tuple(self._free)

    @property
    def may_go_live(self) -> bool:
        """True while fewer rows are live than running requests may hold."""
        return self.num_live < self.num_live_rows

    def take(self, state: RowState) -> int:
        """Return a free row, now in `state`."""
        row = self._free.pop()
        self.num_touched = max(self.num_touched, row + 1)
        self.change(row, RowState.FREE, state)
        return row

    def untouch(self) -> None:
        """Note that no row has pages; all are free."""
        self.num_touched, self._free = 0, sorted(self._free, reverse=True)
        assert len(self._free) == len(self.states)

    def change(self, row: int, old: RowState, new: RowState) -> None:
        """Move a row from one state to another; FREE returns it to the pool."""
        assert self.states[row] is old, f"row {row} is {self.states[row].value}, not {old.value}"
        self.num_live += (new is RowState.LIVE) - (old is RowState.LIVE)
        assert self.num_live <= self.num_live_rows, "more live rows than running requests may hold"
        self.states[row] = new
        if new is RowState.FREE:
            self._free.append(row)
            if self._on_free is not None:
                self._on_free(row)
