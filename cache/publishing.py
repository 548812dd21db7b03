"""What a successful step adds to the trie."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from vlm_serve.cache.reasons import key_at, media_offset
from vlm_serve.cache.rows import RowState

if TYPE_CHECKING:
    from vlm_serve.cache.blocks import Block
    from vlm_serve.cache.leases import Lease
    from vlm_serve.cache.ledger import Ledger
    from vlm_serve.cache.rows import Snapshot
    from vlm_serve.cache.trie import Node
    from vlm_serve.preprocess.keys import PromptKeys


class Publisher:
    """Publishes the blocks, tails and snapshots of one lease up to `length` tokens.

    Where the trie has a key already the existing node stays and joins the lease's path; the request
    goes on in its own block.
    """

    def __init__(
        self, ledger: Ledger, lease: Lease, keys: PromptKeys, length: int, exact_until: int
    ) -> None:
        self._ledger = ledger
        self._lease = lease
        self._keys = keys
        self._length = length
        self._exact_until = exact_until
        self._block_size = ledger.config.block_size

    def publish(self) -> None:
        self._publish_blocks()
        self._publish_tails()
        for position in sorted(self._lease.reserved):
            if position <= self._length:
                self._publish_snapshot(self._lease.reserved.pop(position))

    def _publish_blocks(self) -> None:
        lease, keys = self._lease, self._keys
        for index in range(len(lease.path), self._length // self._block_size):
            key = keys.block_keys[index]
            node = self._child(index, key)
            if node is None:
                node = self._add(index, key, (index + 1) * self._block_size)
            self._ledger.pin(node)
            lease.path.append(node)

    def _publish_tails(self) -> None:
        cuts = self._keys.cuts
        first = bisect_right(cuts, self._lease.length)
        last = bisect_right(cuts, self._length)
        for cut in cuts[first:last]:
            index, rest = divmod(cut, self._block_size)
            if rest and self._child(index, self._keys.tails[cut]) is None:
                self._add(index, self._keys.tails[cut], cut)

    def _publish_snapshot(self, snapshot: Snapshot) -> None:
        """RESERVED -> READY, or back to FREE if the node has one."""
        keys, ledger, position = self._keys, self._ledger, snapshot.position
        index, rest = divmod(position, self._block_size)
        node = self._child(index, keys.tails[position]) if rest else self._lease.path[index - 1]
        assert node is not None and not keys.inside_span(position), (
            f"no snapshot belongs at {position}"
        )
        if node.snapshot is not None:
            ledger.rows.change(snapshot.row, RowState.RESERVED, RowState.FREE)
            ledger.stats.duplicates += 1
            return
        snapshot.exact = self._exact_up_to(position)
        snapshot.previous = self._snapshot_before(position)
        ledger.attach_snapshot(snapshot, node)
        ledger.stats.saves[snapshot.kind] += 1

    def _snapshot_before(self, position: int) -> Snapshot | None:
        """The nearest shallower snapshot that this prompt could use."""
        cuts = self._keys.cuts
        for i in range(bisect_right(cuts, position - 1) - 1, -1, -1):
            index, rest = divmod(cuts[i], self._block_size)
            if rest:
                node = self._child(index, key_at(self._keys, cuts[i]))
            else:
                node = self._lease.path[index - 1]
            if node is not None and node.snapshot is not None:
                return node.snapshot
        return None

    def _child(self, index: int, key: bytes) -> Node | None:
        """The node of block `index` with this key, full or tail."""
        if index:
            return self._lease.path[index - 1].children.get(key)
        root = self._ledger.trie.root(self._keys.root)
        return root.children.get(key) if root is not None else None

    def _add(self, index: int, key: bytes, end: int) -> Node:
        """A new node on the block that holds tokens up to `end`."""
        start = index * self._block_size
        return self._ledger.add_node(
            self._lease.path[index - 1] if index else None,
            self._keys.root,
            key,
            end - start,
            self._block(index),
            exact=self._exact_up_to(end),
            media=media_offset(self._keys, start, end),
        )

    def _block(self, index: int) -> Block:
        """Where the KV of block `index` is: the path's block, so that a duplicate is not kept."""
        if index < len(self._lease.path):
            return self._lease.path[index].block
        return self._ledger.blocks[self._lease.blocks[index]]

    def _exact_up_to(self, position: int) -> bool:
        return self._lease.exact and position <= self._exact_until
