"""What a request holds while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlm_serve.cache.experts import Rows
    from vlm_serve.cache.rows import Snapshot
    from vlm_serve.cache.trie import Node


class LeaseState(Enum):
    OPEN = "open"
    SUSPENDED = "suspended"
    CLOSED = "closed"


@dataclass(eq=False, slots=True)
class Lease:
    """Blocks, state row and pins of one request. Only the cache changes it; the engine reads it.

    Attributes:
        blocks: the block table: the blocks of the path, then own ones.
        row: live state row; -1 while it has none.
        src_row: row to read the initial state from: the snapshot's before the first commit, the
            live row from then on; -1: zero state.
        boundary: tokens that were cached when the lease was opened.
        length: tokens computed so far, cached ones included.
        shared_tokens: a multiple of the block size, possibly beyond `boundary`. The blocks below
            were full when the lease was opened: no KV is written there.
        exact: everything this request reads was made by prefill.
        copies: (source block, destination block, rows) to copy before the first step.
        committed: a step has succeeded since the lease was opened.
        private: nothing that it computes is ever published.
    """

    blocks: list[int] = field(default_factory=list)
    row: int = -1
    src_row: int = -1
    boundary: int = 0
    length: int = 0
    shared_tokens: int = 0
    exact: bool = True
    copies: tuple[tuple[int, int, int], ...] = ()
    committed: bool = False
    private: bool = False
    state: LeaseState = LeaseState.OPEN
    # The cache's own:
    num_shared: int = 0
    """Leading entries of `blocks` that the path's pins hold, one per node; it holds the others."""
    path: list[Node] = field(default_factory=list, repr=False)
    """The pinned full nodes from the root on."""
    tail: Node | None = field(default=None, repr=False)
    snapshot: Snapshot | None = field(default=None, repr=False)
    """What the request starts from: pinned until the first commit."""
    copy_source: int = -1
    """The block that a forked request copies its first rows from, held until the first commit."""
    reserved: dict[int, Snapshot] = field(default_factory=dict, repr=False)
    """Reserved snapshots by position."""
    pending_key: bytes | None = field(default=None, repr=False)
    """Key of the block that this request publishes next."""
    expert_seed: Rows | None = field(default=None, repr=False)
    """Expert rows between the last block boundary and `boundary`, where known."""
    expert_rows: list[Rows] | None = field(default=None, repr=False)
    """Expert rows of the block in progress, from its first token on; None: some are missing."""

    @property
    def own_blocks(self) -> list[int]:
        """Blocks that this request holds itself."""
        return self.blocks[self.num_shared :]

    @property
    def held_blocks(self) -> set[int]:
        """Every block that this request keeps from being evicted."""
        held = {*self.blocks, *((self.copy_source,) if self.copy_source >= 0 else ())}
        if self.tail is not None:
            held.add(self.tail.block.id)
        return held
