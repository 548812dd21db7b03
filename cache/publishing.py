"""Publication of a successful step in the trie."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlm_serve.cache.matching import media_offset, media_starts
from vlm_serve.cache.pools import RowState
from vlm_serve.cache.records import NO_MEDIA, Block, Branch, Lease, Node, Snapshot

if TYPE_CHECKING:
    from vlm_serve.cache.ledger import Ledger
    from vlm_serve.preprocess.identity.keys import PromptKeys


MAX_NODES_PER_BLOCK = 16
"""Limit of tails without a snapshot per block. A prompt of nothing but end-of-turn tokens would
otherwise cost one node per token."""


class Publisher:
    """Publishes the blocks, tails and snapshots of one lease up to `length` tokens.

    If the trie already has a key, the existing node joins the lease's path. The request continues
    in that node's block and returns its own.

    Args:
        exact_until: tokens from there on were computed by decode steps.
        answer_start: tokens from there on were generated; None: none.
    """

    def __init__(
        self,
        ledger: Ledger,
        lease: Lease,
        keys: PromptKeys,
        length: int,
        exact_until: int,
        answer_start: int | None = None,
    ) -> None:
        self._ledger = ledger
        self._lease = lease
        self._keys = keys
        self._length = length
        self._exact_until = exact_until
        self._answer_start = length if answer_start is None else answer_start
        self._block_size = ledger.config.block_size

    def publish(self) -> None:
        self._publish_blocks()
        self._publish_tails()
        for position in sorted(self._lease.reserved):
            if position <= self._length:
                self.publish_snapshot(self._lease.reserved.pop(position))

    def publish_loaded(self) -> None:
        """Publish content from a lower tier; of the tails only the one at `length`, because the
        others were not loaded."""
        self._publish_blocks()
        index, rest = divmod(self._length, self._block_size)
        if rest and self._node_at(self._length) is None:
            self._add(index, self._keys.tails[self._length], self._length)
        if self._length in self._lease.reserved:
            self.publish_snapshot(self._lease.reserved.pop(self._length))

    def publish_row(self, row: int) -> bool:
        """Publish a request's row as the snapshot at `length`; return False, without any change, if
        none belongs there or if there is one."""
        node = self._node_at(self._length) if self._length else None
        if node is None or node.inside_span or node.snapshot is not None:
            return False
        rows = self._ledger.rows
        rows.change(row, rows.states[row], RowState.RESERVED)
        self.publish_snapshot(Snapshot(row, self._length, "left"))
        return True

    def _publish_blocks(self) -> None:
        lease, keys = self._lease, self._keys
        for index in range(len(lease.path), self._length // self._block_size):
            key = keys.block_keys[index]
            node = self._parent(index).children.get(key)
            if node is None:
                node = self._add(index, key, (index + 1) * self._block_size)
            self._ledger.pin(node)
            lease.path.append(node)
            self._move_into(node, index)

    def _move_into(self, node: Node, index: int) -> None:
        """Let the path's pin hold the block from now on, and return an own duplicate: a lease never
        holds more blocks than its tokens need."""
        lease, blocks = self._lease, self._ledger.blocks
        written = blocks[lease.blocks[index]]
        if written is not node.block:
            lease.blocks[index] = node.block.id
            lease.moved = index if lease.moved is None else min(lease.moved, index)
            lease.exact = lease.exact and node.exact
        lease.num_shared = index + 1
        self._ledger.let_go(written)

    def _publish_tails(self) -> None:
        cuts = self._keys.cuts
        first = bisect_right(cuts, self._lease.length)
        last = bisect_right(cuts, self._length)
        for cut in cuts[first:last]:
            index, rest = divmod(cut, self._block_size)
            if rest and self._node_at(cut) is None:
                room = len(self._block(index).nodes) < MAX_NODES_PER_BLOCK
                if room or cut in self._lease.reserved:
                    self._add(index, self._keys.tails[cut], cut)

    def publish_snapshot(self, snapshot: Snapshot) -> None:
        """Move a snapshot from RESERVED to READY, or back to FREE if the node has one."""
        ledger, position = self._ledger, snapshot.position
        node = self._node_at(position)
        assert node is not None and not node.inside_span, f"no snapshot belongs at {position}"
        if node.snapshot is not None:
            ledger.rows.change(snapshot.row, RowState.RESERVED, RowState.FREE)
            ledger.events.counted.publish(("duplicates", ""))
            return
        snapshot.exact = self._exact_up_to(position)
        snapshot.previous = self._snapshot_before(position)
        ledger.attach_snapshot(snapshot, node)

    def _snapshot_before(self, position: int) -> Snapshot | None:
        """Return the nearest shallower snapshot that this prompt could use."""
        cuts = self._keys.cuts
        for i in range(bisect_right(cuts, position - 1) - 1, -1, -1):
            index, rest = divmod(cuts[i], self._block_size)
            node = self._node_at(cuts[i]) if rest else self._lease.path[index - 1]
            if node is not None and node.snapshot is not None:
                return node.snapshot
        return None

    def _node_at(self, cut: int) -> Node | None:
        return self._ledger.trie.node_at(self._lease.path, self._keys, cut)

    def _parent(self, index: int) -> Branch:
        """Return the parent of block `index`: the path's node before it, or the root."""
        if index:
            return self._lease.path[index - 1]
        root = self._ledger.trie.root(self._keys.root)
        return root if root is not None else Branch(self._keys.root, 0, 0)

    def _add(self, index: int, key: bytes, end: int) -> Node:
        """Add a node on the block that holds tokens up to `end`."""
        start = index * self._block_size
        node = Node(key, self._parent(index), end - start, self._block(index))
        node.exact = self._exact_up_to(end)
        node.media_offset = media_offset(self._keys, start, end)
        if node.media_offset != NO_MEDIA:
            node.media = media_starts(self._keys, start, end)
        node.packed_tokens = self._keys.packed(start, end)
        node.inside_span = self._keys.inside_span(end)
        node.planned = self._lease.planned
        node.answered = max(0, end - max(start, self._answer_start))
        if index == self._lease.boundary // self._block_size:
            node.answered += self._lease.answered
        if end in self._keys.brought:  # first, because who is told of the node asks for its mark
            self._ledger.marks.add(self._keys, end)
        self._ledger.add_node(node)
        return node

    def _block(self, index: int) -> Block:
        """Return the block that holds the KV of block `index`: the path's block, so that a
        duplicate is not kept."""
        if index < len(self._lease.path):
            return self._lease.path[index].block
        return self._ledger.blocks[self._lease.blocks[index]]

    def _exact_up_to(self, position: int) -> bool:
        return self._lease.exact and position <= self._exact_until


@dataclass(frozen=True, slots=True)
class LeftState:
    """What a request leaves: the keys of its tokens, and the position up to which they were
    computed by prefill."""

    keys: PromptKeys
    exact_until: int


def give_row(ledger: Ledger, lease: Lease, left: LeftState) -> None:
    """Turn the row of a lease that ends into the snapshot there, if one belongs there. Nothing is
    copied."""
    published = ledger.config.enabled and lease.committed and not lease.private
    if lease.row < 0 or not published:
        return
    if ledger.config.exact_only and lease.length > left.exact_until:
        return
    publisher = Publisher(ledger, lease, left.keys, lease.length, left.exact_until)
    if publisher.publish_row(lease.row):
        lease.row = lease.src_row = -1
