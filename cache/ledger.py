"""The cache's ledger: pools, trie, pins and eviction candidates, kept consistent together.

The rest of this package changes them only through the methods here. Holder counts, candidate queues
and free lists therefore agree after every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vlm_serve.cache.candidates import LazyHeap, Priority
from vlm_serve.cache.events import CacheEvents
from vlm_serve.cache.logprobs import RowKeeper
from vlm_serve.cache.marks import KnownMarks
from vlm_serve.cache.node_table import NodeTable
from vlm_serve.cache.pools import BlockPool, RowPool, RowState
from vlm_serve.cache.records import Block, Node, Snapshot
from vlm_serve.cache.spare_rows import SpareRows
from vlm_serve.cache.trie import Trie

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vlm_serve.cache.config import CacheConfig

WORTHLESS, VALUED = 0, 1
"""Classes of candidates: for a hybrid model, KV without a snapshot at or below it saves nothing."""


class GhostMemory:
    """The last `limit` evicted keys, the oldest dropped first: it tells "evicted" from "never seen"
    and holds no data."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._keys: dict[bytes, None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: bytes) -> None:
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > self.limit:
            del self._keys[next(iter(self._keys))]

    def discard(self, key: bytes) -> None:
        """Remove a key that is back in the cache."""
        self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()


class Ledger:
    """State shared by the parts of the cache.

    Attributes:
        nodes: counters of the trie's nodes.
        units: blocks whose nodes are all unpinned leaves: evicting one frees it.
        spare_snapshots: READY and unpinned snapshots.
        age: the value of the most valuable block evicted so far. A node's credit is the age at its
            last use, so one of great value long ago is evicted eventually: Greedy-Dual-Size
            (Cao and Irani, 1997). No clock is needed.
        expert_bytes: size of all routed expert rows.
        logprobs: the nodes that hold prompt log-probabilities.
        evicted_nodes, evicted_snapshots: keys of evicted objects, most recent ones only.
        marks: the cut points that prompts have brought.
        pending: keys of the blocks that running requests publish next -> number of requests.
        version: number of removals so far; an older match is stale.
        additions: number of nodes and snapshots published so far.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.events = events = CacheEvents()
        self.blocks = BlockPool(config.num_blocks, events.block_freed.publish)
        self.rows = RowPool(config.num_rows, config.num_live_rows, events.row_freed.publish)
        self.trie = Trie(config.block_size)
        self.nodes = NodeTable()
        self.units: LazyHeap[Block] = LazyHeap()
        self.spare_snapshots = SpareRows(config.num_rows)
        self.age = 0.0
        ghosts = config.num_blocks if config.ghost_entries is None else config.ghost_entries
        self.evicted_nodes = GhostMemory(ghosts)
        self.evicted_snapshots = GhostMemory(ghosts)
        self.marks = KnownMarks()
        self.pending: dict[bytes, int] = {}
        self.expert_bytes = 0
        self.logprobs = RowKeeper(config.logprob_bytes, self.used)
        self.version = 0
        self.additions = 0
        self._counter = 0

    # Pins

    def pin(self, node: Node) -> None:
        self.nodes.pins[node.slot] += 1
        self.blocks.harden(node.block)
        self.units.discard(node.block)
        self._path_changed((node,))

    def unpin(self, node: Node) -> None:
        assert node.pins > 0, "a node was unpinned twice"
        self.nodes.pins[node.slot] -= 1
        self.let_go(node.block)
        self._path_changed((node,))

    def hold_path(self, path: Sequence[Node], *, pins: int = 0, parked: int = 0) -> None:
        """Change the pins of a path from the root on: `pins` of running requests and `parked` ones
        of suspended requests are added to each node's."""
        if not path:
            return
        nodes, slots = self.nodes, self.nodes.slots(path)
        nodes.pins[slots] += pins
        nodes.parked[slots] += parked
        assert not np.any(nodes.pins[slots] < 0), "a node was unpinned twice"
        self.blocks.hold_path(nodes.blocks[slots], hard=pins, soft=parked)
        # All but the last one have a child on the path, so their blocks are no candidates.
        self.refresh_unit(path[-1].block)
        self._path_changed(path)

    def use_path(self, path: Sequence[Node], now: int, *, hits: int = 1) -> None:
        """Count a use of distinct nodes at `now`, which adds `hits` to their hits."""
        self.nodes.use(self.nodes.slots(path), now, self.age, hits)
        if hits:
            self._path_changed(path)

    def _path_changed(self, path: Iterable[Node]) -> None:
        """Record that the pins or hits of nodes have changed."""
        if self.logprobs.num_bytes:
            for node in path:
                if node.logprobs is not None:
                    self.logprobs.refresh(node)
        if self.events.node_used.subscribers:
            for node in path:
                self.events.node_used.publish(node)

    def let_go(self, block: Block) -> None:
        """Release a running request's hold on a block."""
        self.blocks.loosen(block)
        self.refresh_unit(block)

    def drop_parked_block(self, block: Block) -> None:
        self.blocks.drop_parked(block)
        self.refresh_unit(block)

    def pin_snapshot(self, snapshot: Snapshot) -> None:
        assert snapshot.node is not None, "only an attached snapshot can be pinned"
        snapshot.pins += 1
        self.spare_snapshots.discard(snapshot)

    def unpin_snapshot(self, snapshot: Snapshot) -> None:
        assert snapshot.pins > 0, "a snapshot was unpinned twice"
        snapshot.pins -= 1
        self.refresh_snapshot(snapshot)

    # Use

    def used(self, node: Node) -> None:
        """Publish that a node's pins, hits or size have changed."""
        if self.events.node_used.subscribers:
            self.events.node_used.publish(node)

    def tick(self) -> int:
        """Return the next value of the counter that orders uses."""
        self._counter += 1
        return self._counter

    def touch_snapshot(self, snapshot: Snapshot, now: int) -> None:
        snapshot.last_used, snapshot.asked = now, self.spare_snapshots.prompts
        snapshot.heirs.clear()

    def expect(self, node: Node, change: int) -> None:
        """Change the number of requests that are about to use a node and its snapshot."""
        node.expected += change
        assert node.expected >= 0, "a use was expected by nobody"
        if node.parent.children.get(node.key) is not node:
            return  # it was evicted in the meantime
        self.refresh_unit(node.block)
        if node.snapshot is not None:
            self.refresh_snapshot(node.snapshot)

    # Publication and removal

    def add_node(self, node: Node) -> None:
        """Publish a node on a block that a running request holds."""
        self.additions += 1
        self.trie.insert(node)
        node.table, node.slot = self.nodes, self.nodes.add(node.block.id, node.answered)
        self.blocks.attach(node.block, node)
        if isinstance(node.parent, Node):
            self.units.discard(node.parent.block)
        self.evicted_nodes.discard(node.key)
        self.nodes.last_used[node.slot] = self._counter
        self.nodes.credit[node.slot] = self.age
        if self.events.node_added.subscribers:
            self.events.node_added.publish(node)

    def remove_node(self, node: Node) -> None:
        """Evict an unpinned leaf with its snapshot."""
        assert node.pins == 0 and node.parked == 0, "a pinned node cannot go"
        if node.snapshot is not None:
            self.remove_snapshot(node.snapshot)
        self.version += 1
        self.events.node_evicted.publish(node)
        self.evicted_nodes.add(node.key)
        if node.experts is not None:
            self.expert_bytes -= node.experts.nbytes
            node.experts = None  # readers of the tree may keep a reference to the node
        if node.logprobs is not None:
            self.logprobs.drop(node)
        self.trie.remove(node)
        self.nodes.remove(node)
        self.blocks.detach(node.block, node)
        self.refresh_unit(node.block)
        if isinstance(node.parent, Node):
            self.refresh_unit(node.parent.block)

    def attach_snapshot(self, snapshot: Snapshot, node: Node) -> None:
        """Move a snapshot from RESERVED to READY at a node that has none."""
        assert node.snapshot is None and snapshot.position == node.end
        self.additions += 1
        self.rows.change(snapshot.row, RowState.RESERVED, RowState.READY)
        snapshot.node = node
        node.snapshot = snapshot
        self.nodes.has_snapshot[node.slot] = True
        self.evicted_snapshots.discard(node.key)
        self.touch_snapshot(snapshot, self._counter)
        self.refresh_snapshot(snapshot)
        self.refresh_unit(node.block)
        self.events.snapshot_ready.publish(snapshot)
        self.used(node)

    def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Move a snapshot from READY to FREE; the KV behind it is demoted."""
        self._detach_snapshot(snapshot)
        self.events.counted.publish(("evictions", "snapshot"))
        self.rows.change(snapshot.row, RowState.READY, RowState.FREE)

    def steal_snapshot(self, snapshot: Snapshot) -> int:
        """Move a snapshot from READY to LIVE: its only reader goes on in the snapshot's own row."""
        assert snapshot.pins == 1, "others still read the snapshot"
        snapshot.pins = 0
        self._detach_snapshot(snapshot)
        self.events.counted.publish(("stolen", ""))
        self.rows.change(snapshot.row, RowState.READY, RowState.LIVE)
        return snapshot.row

    def _detach_snapshot(self, snapshot: Snapshot) -> None:
        assert snapshot.pins == 0, "a pinned snapshot cannot go"
        node = snapshot.node
        assert node is not None and node.snapshot is snapshot
        self.version += 1
        self.events.snapshot_evicted.publish(snapshot)
        self.evicted_snapshots.add(node.key)
        self.spare_snapshots.discard(snapshot)
        snapshot.node = None
        node.snapshot = None
        self.nodes.has_snapshot[node.slot] = False
        self.refresh_unit(node.block)
        self.used(node)

    # Candidates

    def refresh_unit(self, block: Block) -> None:
        """Add a block to the eviction candidates or remove it from them."""
        if is_unit(block):
            self.units.push(block, self.unit_priority(block))
        else:
            self.units.discard(block)

    def refresh_snapshot(self, snapshot: Snapshot) -> None:
        if snapshot.pins == 0 and snapshot.node is not None:
            self.spare_snapshots.put(snapshot)
        else:
            self.spare_snapshots.discard(snapshot)

    def unit_priority(self, block: Block) -> Priority:
        """Return class and value of the most valuable node on a block."""
        return max(self._node_priority(node) for node in block.nodes)

    def _node_priority(self, node: Node) -> Priority:
        if not self.config.has_state:
            worth = node.num_tokens * (node.hits + 1.0 + node.expected)
        elif node.snapshot is not None:
            worth = node.snapshot.worth
        else:
            return WORTHLESS, node.credit, node.last_used
        return VALUED, node.credit + worth, node.last_used


def is_unit(block: Block) -> bool:
    """Return True if evicting every node on the block frees it and orphans nothing."""
    return (
        block.hard == 0
        and block.soft == 0
        and bool(block.nodes)
        and not any(node.children for node in block.nodes)
    )
