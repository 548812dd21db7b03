"""Every invariant of the cache, recomputed from scratch (design, section 13)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from vlm_serve.cache.leases import LeaseState
from vlm_serve.cache.ledger import is_unit
from vlm_serve.cache.rows import RowState
from vlm_serve.cache.trie import NO_MEDIA, Node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_serve.cache.leases import Lease
    from vlm_serve.cache.ledger import Ledger
    from vlm_serve.cache.rows import Snapshot
    from vlm_serve.cache.suspension import Suspensions


def audit(ledger: Ledger, suspensions: Suspensions, leases: Sequence[Lease]) -> None:
    """Raises AssertionError that names the violated invariant."""
    nodes = list(ledger.trie.walk())
    parked = [lease for _, lease in suspensions.items()]
    _check_trie(ledger, nodes)
    _check_leases(ledger, suspensions, leases)
    _check_pins(nodes, leases, parked)
    _check_blocks(ledger, nodes, leases, parked)
    _check_rows(ledger, nodes, leases, parked)
    _check_candidates(ledger, nodes)
    _check_memory(ledger, leases)


def _check_trie(ledger: Ledger, nodes: list[Node]) -> None:
    trie = ledger.trie
    size = ledger.config.block_size
    assert trie.num_nodes == len(nodes), "invariant 4: node count is wrong"
    assert all(root.children for root in trie.roots.values()), "invariant 4: a root without nodes"
    for key, root in trie.roots.items():
        assert root.key == key and root.depth == 0 and root.end == 0, "invariant 4: broken root"
    media: Counter[tuple[bytes, int]] = Counter()
    for node in nodes:
        parent = node.parent
        assert parent.children.get(node.key) is node, "invariant 4: parent does not name its child"
        assert node.depth == parent.depth + 1, "invariant 4: depth is not the parent's plus one"
        assert 1 <= node.num_tokens <= size, "invariant 4: a node covers at most one block"
        assert node.end == parent.end + node.num_tokens, "invariant 4: end is wrong"
        assert parent.end % size == 0, "invariant 4: a tail is not a leaf"
        if node.media_offset != NO_MEDIA:
            media[parent.key, node.media_offset] += 1
    assert dict(media) == trie.media_starts, "invariant 4: media starts are wrong"


def _check_leases(ledger: Ledger, suspensions: Suspensions, leases: Sequence[Lease]) -> None:
    size = ledger.config.block_size
    for lease in leases:
        assert lease.state is LeaseState.OPEN, "invariant 7: a listed lease is not open"
    for suspended, lease in suspensions.items():
        assert suspended.lease is lease, "invariant 7: a suspended request lost its lease"
        assert lease.state is LeaseState.SUSPENDED, "invariant 7: a suspended lease is not"
        assert not lease.reserved and lease.snapshot is None and lease.tail is None, (
            "invariant 7: a suspended request keeps restore pins or reservations"
        )
    for lease in [*leases, *(lease for _, lease in suspensions.items())]:
        assert lease.shared_tokens % size == 0, "invariant 7: shared length is wrong"
        assert lease.num_shared * size <= lease.shared_tokens <= len(lease.blocks) * size, (
            "invariant 7: shared length is wrong"
        )
        assert lease.boundary <= lease.length, "invariant 6: lengths out of order"
        assert len(lease.path) >= lease.num_shared, "invariant 2: a shared block is not pinned"
        for index, node in enumerate(lease.path):
            before = lease.path[index - 1] if index else None
            assert node.num_tokens == size, "invariant 4: a tail on a path"
            assert node.parent is before or (before is None and node.parent.depth == 0), (
                "invariant 4: a path with a gap"
            )
            assert index >= lease.num_shared or lease.blocks[index] == node.block.id, (
                "invariant 1: a shared block is not the node's"
            )
        if ledger.config.enabled:
            assert len(lease.path) >= lease.length // size, "invariant 7: computed and unpublished"
        if lease.snapshot is not None:
            assert not lease.committed, "invariant 7: a restore pin outlived the first commit"
            assert lease.snapshot.position == lease.boundary, "invariant 5: wrong snapshot"
            assert lease.src_row == lease.snapshot.row, "invariant 5: reads another row"
        for position, snapshot in lease.reserved.items():
            assert position > lease.length, "invariant 7: a reservation was passed over"
            assert snapshot.position == position and snapshot.node is None


def _check_pins(nodes: list[Node], leases: Sequence[Lease], parked: Sequence[Lease]) -> None:
    pins = Counter(id(node) for lease in leases for node in lease.path)
    pins.update(id(lease.tail) for lease in leases if lease.tail is not None)
    soft = Counter(id(node) for lease in parked for node in lease.path)
    known = {id(node) for node in nodes}
    assert known >= pins.keys() | soft.keys(), "invariant 3: a pinned node was evicted"
    for node in nodes:
        assert node.pins == pins[id(node)], "invariant 2: pins of a node are wrong"
        assert node.parked == soft[id(node)], "invariant 2: parked pins of a node are wrong"
        parent = node.parent
        if isinstance(parent, Node):
            assert parent.pins or not node.pins, "invariant 2: an ancestor is not pinned"
            assert parent.pins or parent.parked or not node.parked, (
                "invariant 2: an ancestor is not parked"
            )


def _check_blocks(
    ledger: Ledger, nodes: list[Node], leases: Sequence[Lease], parked: Sequence[Lease]
) -> None:
    pool, size = ledger.blocks, ledger.config.block_size
    hard = Counter(block for lease in leases for block in lease.own_blocks)
    soft = Counter(block for lease in parked for block in lease.own_blocks)
    hard.update(lease.copy_source for lease in leases if lease.copy_source >= 0)
    writers = Counter(
        block
        for lease in [*leases, *parked]
        for block in lease.blocks[lease.shared_tokens // size :]
    )
    assert not writers or max(writers.values()) == 1, "invariant 1: a block has two writers"
    held: dict[int, list[Node]] = {}
    for node in nodes:
        held.setdefault(node.block.id, []).append(node)
        hard[node.block.id] += node.pins
        soft[node.block.id] += node.parked
    free = pool.free_ids
    assert len(free) == len(set(free)), "invariant 1: a block is free twice"
    free_set = set(free)
    reclaimable = 0
    for block in pool.blocks:
        on_block = held.get(block.id, [])
        assert block.hard == hard[block.id], f"invariant 2: holds of block {block.id} are wrong"
        assert block.soft == soft[block.id], f"invariant 2: parked holds of {block.id} are wrong"
        assert {id(node) for node in block.nodes} == {id(node) for node in on_block}, (
            f"invariant 1: nodes of block {block.id} are wrong"
        )
        assert len({id(node.parent) for node in on_block}) <= 1, (
            "invariant 4: one block under two parents"
        )
        idle = not block.hard and not block.soft and not block.nodes
        assert idle == (block.id in free_set), f"invariant 1: block {block.id} leaked"
        reclaimable += not block.hard and (bool(block.soft) or bool(block.nodes))
    assert pool.num_reclaimable == reclaimable, "invariant 1: reclaimable blocks are wrong"


def _check_rows(
    ledger: Ledger, nodes: list[Node], leases: Sequence[Lease], parked: Sequence[Lease]
) -> None:
    rows = ledger.rows
    expected: dict[int, RowState] = {}

    def expect(row: int, state: RowState) -> None:
        assert row not in expected, f"invariant 1: row {row} has two owners"
        expected[row] = state

    readers = Counter(id(lease.snapshot) for lease in leases if lease.snapshot is not None)
    for lease in leases:
        if lease.row >= 0:
            expect(lease.row, RowState.LIVE)
        for snapshot in lease.reserved.values():
            expect(snapshot.row, RowState.RESERVED)
    for lease in parked:
        if lease.row >= 0:
            expect(lease.row, RowState.PRIVATE)
    ready: list[Snapshot] = []
    for node in nodes:
        snapshot_of_node = node.snapshot
        if snapshot_of_node is not None:
            ready.append(snapshot_of_node)
            expect(snapshot_of_node.row, RowState.READY)
            assert snapshot_of_node.node is node, "invariant 5: snapshot names another node"
            assert snapshot_of_node.position == node.end, "invariant 5: snapshot is not at the end"
            assert snapshot_of_node.pins == readers[id(snapshot_of_node)], (
                "invariant 2: pins of a snapshot are wrong"
            )
    assert {id(snapshot) for snapshot in ready} >= readers.keys(), (
        "invariant 5: a pinned snapshot was evicted"
    )
    for row, state in enumerate(rows.states):
        assert state is expected.get(row, RowState.FREE), f"invariant 1: row {row} leaked"
    assert sorted(rows.free_rows) == [
        row for row, state in enumerate(rows.states) if state is RowState.FREE
    ], "invariant 1: free rows are wrong"
    live = sum(state is RowState.LIVE for state in rows.states)
    assert rows.num_live == live <= rows.num_live_rows, "invariant 1: live rows are wrong"


def _check_candidates(ledger: Ledger, nodes: list[Node]) -> None:
    units = {id(block): block for _, block in ledger.units.items().values()}
    expected = {id(node.block) for node in nodes if is_unit(node.block)}
    assert units.keys() == expected, "invariant 3: eviction candidates are wrong"
    assert len(ledger.units) == len(units), "invariant 3: candidate count is wrong"
    spare = {id(snapshot) for _, snapshot in ledger.spare_snapshots.items().values()}
    unpinned = {
        id(node.snapshot) for node in nodes if node.snapshot is not None and not node.snapshot.pins
    }
    assert spare == unpinned, "invariant 3: spare snapshots are wrong"
    assert len(ledger.spare_snapshots) == len(spare), "invariant 3: spare count is wrong"
    for priority, block in ledger.units.items().values():
        assert priority[0] == ledger.unit_priority(block)[0], "invariant 3: a candidate's class"


def _check_memory(ledger: Ledger, leases: Sequence[Lease]) -> None:
    pending = Counter(lease.pending_key for lease in leases if lease.pending_key is not None)
    assert dict(pending) == ledger.pending, "invariant 7: keys in flight are wrong"
    for ghosts in (ledger.evicted_nodes, ledger.evicted_snapshots):
        assert len(ghosts) <= ghosts.limit, "the memory of evicted keys is bounded"
