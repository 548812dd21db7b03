"""Recompute every invariant of the cache from scratch (docs/architecture.md#invariants).

Messages use the numbers from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from vlm_serve.cache.ledger import Ledger, is_unit
from vlm_serve.cache.logprobs import check_rows
from vlm_serve.cache.node_table import NOBODY
from vlm_serve.cache.pools import RowState
from vlm_serve.cache.records import NO_MEDIA, Block, Lease, LeaseState, Node, Snapshot
from vlm_serve.cache.suspension import Suspended
from vlm_serve.cache.timed_pins import TimedPin

T = TypeVar("T")
_AT_ONCE = 256
"""Nodes or blocks per batch between two calls of `wanted`: a fraction of a millisecond."""


@dataclass(frozen=True)
class AuditedState:
    """Everything that holds a resource, and the ledger that records it."""

    ledger: Ledger
    leases: Sequence[Lease]
    suspended: Sequence[tuple[Suspended, Lease]]
    timed_pins: Sequence[TimedPin]

    @property
    def parked(self) -> list[Lease]:
        return [lease for _, lease in self.suspended]


class _Interrupted(Exception):
    """The caller has more urgent work."""


class _Nodes(list[Node]):
    """All nodes. Iteration raises `_Interrupted` as soon as `wanted` returns True."""

    def __init__(self, nodes: Iterable[Node], wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        super().__init__(self.watched(nodes))

    def __iter__(self) -> Iterator[Node]:
        return self.watched(super().__iter__())

    def watched(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, checking for interruption. Raises _Interrupted."""
        source = iter(items)
        while piece := list(islice(source, _AT_ONCE)):
            if self._wanted():
                raise _Interrupted
            yield from piece


def audit(books: AuditedState, wanted: Callable[[], bool]) -> bool:
    """Recompute everything, a few hundred nodes at a time.

    Args:
        wanted: returns True to interrupt the audit; called between batches.

    Returns:
        True if the audit ran to its end.

    Raises AssertionError that names the violated invariant.
    """
    try:
        nodes = _Nodes(books.ledger.trie.walk(), wanted)
        _check_trie(books.ledger, nodes)
        _check_states(books)
        for lease in [*books.leases, *books.parked]:
            _check_lease(books.ledger, lease)
        _check_pins(books, nodes)
        _check_blocks(books, nodes)
        _check_snapshots(books, nodes)
        _check_rows(books, nodes)
        _check_candidates(books.ledger, nodes)
        _check_memory(books, nodes)
    except _Interrupted:
        return False
    return True


def _check_trie(ledger: Ledger, nodes: list[Node]) -> None:
    trie, size = ledger.trie, ledger.config.block_size
    assert trie.num_nodes == len(nodes), "invariant 4: node count is wrong"
    assert len({node.slot for node in nodes}) == len(nodes), "invariant 4: two nodes count as one"
    assert all(root.children for root in trie.roots.values()), "invariant 4: a root without nodes"
    for key, root in trie.roots.items():
        assert root.key == key and root.depth == 0 and root.end == 0, "invariant 4: broken root"
    media: Counter[tuple[bytes, int]] = Counter()
    for node in nodes:
        parent = node.parent
        assert parent.children.get(node.key) is node, "invariant 4: parent does not name its child"
        assert trie.nodes.get(node.key) is node, "invariant 4: the index does not name a node"
        assert node.depth == parent.depth + 1, "invariant 4: depth is not the parent's plus one"
        assert 1 <= node.num_tokens <= size, "invariant 4: a node covers at most one block"
        assert node.end == parent.end + node.num_tokens, "invariant 4: end is wrong"
        assert parent.end % size == 0, "invariant 4: a tail is not a leaf"
        assert not node.exact or not isinstance(parent, Node) or parent.exact, (
            "invariant 4: exact behind what is not"
        )
        columns = ledger.nodes
        assert node.table is columns and node.slot != NOBODY, "invariant 4: a node without counters"
        assert columns.blocks[node.slot] == node.block.id, "invariant 4: a column is out of date"
        assert columns.answered[node.slot] == node.answered, "invariant 4: a column is out of date"
        assert columns.has_snapshot[node.slot] == (node.snapshot is not None), (
            "invariant 5: the column of snapshots is out of date"
        )
        if node.media_offset != NO_MEDIA:
            media[parent.key, node.media_offset] += 1
    assert dict(media) == trie.media_starts, "invariant 4: media starts are wrong"


def _check_states(books: AuditedState) -> None:
    for lease in books.leases:
        assert lease.state is LeaseState.OPEN, "invariant 7: a listed lease is not open"
    for suspended, lease in books.suspended:
        assert suspended.lease is lease, "invariant 7: a suspended request lost its lease"
        assert lease.state is LeaseState.SUSPENDED, "invariant 7: a suspended lease is not"
        restore = lease.snapshot is None and lease.tail is None and lease.copy_source < 0
        assert restore and not lease.reserved, (
            "invariant 7: a suspended request keeps restore pins or reservations"
        )
        assert lease.pending_key is None, "invariant 7: a suspended request is in flight"


def _check_lease(ledger: Ledger, lease: Lease) -> None:
    size = ledger.config.block_size
    assert lease.shared_tokens % size == 0, "invariant 7: shared length is wrong"
    assert lease.shared_tokens <= len(lease.blocks) * size, "invariant 7: shared length is wrong"
    assert lease.boundary <= lease.length, "invariant 6: lengths out of order"
    assert len(lease.path) == lease.num_shared, "invariant 2: a shared block is not pinned"
    for index, node in enumerate(lease.path):
        before = lease.path[index - 1] if index else None
        assert node.num_tokens == size, "invariant 4: a tail on a path"
        assert node.parent is before or (before is None and node.parent.depth == 0), (
            "invariant 4: a path with a gap"
        )
        assert lease.blocks[index] == node.block.id, "invariant 1: a shared block is not the node's"
    if ledger.config.enabled and not lease.private:
        shared = lease.prefilled if ledger.config.exact_only else lease.length
        assert len(lease.path) >= shared // size, "invariant 7: computed and unpublished"
    else:
        assert len(lease.path) == lease.old_path, "invariant 7: published although it must not be"
    if lease.snapshot is not None:
        assert not lease.committed, "invariant 7: a restore pin outlived the first commit"
        assert lease.snapshot.position == lease.boundary, "invariant 5: restores another position"
        assert lease.src_row == lease.snapshot.row, "invariant 5: reads another row"
    elif lease.committed and lease.row >= 0:
        assert lease.src_row == lease.row, "invariant 5: reads another row"
    if lease.trailing is not None:
        assert lease.trailing.position % size == 0, "invariant 5: a state inside a block"
        assert lease.trailing.node is None and not lease.trailing.pins, (
            "invariant 5: reserved and attached"
        )
    for position, snapshot in lease.reserved.items():
        assert position > lease.length, "invariant 7: a reservation was passed over"
        assert snapshot.position == position, "invariant 5: reserved for another position"
        assert snapshot.node is None and not snapshot.pins, "invariant 5: reserved and attached"


def _check_pins(books: AuditedState, nodes: list[Node]) -> None:
    pins = Counter(id(node) for lease in books.leases for node in lease.path)
    pins.update(id(lease.tail) for lease in books.leases if lease.tail is not None)
    pins.update(id(node) for pin in books.timed_pins for node in pin.nodes)
    soft = Counter(id(node) for lease in books.parked for node in lease.path)
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


def _check_blocks(books: AuditedState, nodes: _Nodes) -> None:
    pool, size = books.ledger.blocks, books.ledger.config.block_size
    hard = Counter(block for lease in books.leases for block in lease.own_blocks)
    hard.update(lease.copy_source for lease in books.leases if lease.copy_source >= 0)
    soft = Counter(block for lease in books.parked for block in lease.own_blocks)
    writers = Counter(
        block
        for lease in [*books.leases, *books.parked]
        for block in lease.blocks[max(lease.shared_tokens, lease.length) // size :]
    )
    assert not writers or max(writers.values()) == 1, "invariant 1: a block has two writers"
    held: dict[int, list[Node]] = {}
    for node in nodes:
        held.setdefault(node.block.id, []).append(node)
        hard[node.block.id] += node.pins
        soft[node.block.id] += node.parked
    free = set(pool.free_ids)
    assert len(free) == pool.num_free, "invariant 1: a block is free twice"
    reclaimable = 0
    for block in nodes.watched(pool.blocks):
        number = block.id
        in_use = bool(block.hard or block.soft or block.nodes)
        assert in_use or number in free, f"invariant 1: block {number} leaked"
        assert not in_use or number not in free, f"invariant 1: block {number} is free and held"
        if in_use or number in hard or number in soft or number in held:
            _check_block(block, held.get(number, []), hard[number], soft[number])
            reclaimable += in_use and not block.hard
    assert pool.num_reclaimable == reclaimable, "invariant 1: reclaimable blocks are wrong"


def _check_block(block: Block, nodes: list[Node], hard: int, soft: int) -> None:
    assert block.hard == hard, f"invariant 2: holds of block {block.id} are wrong"
    assert block.soft == soft, f"invariant 2: parked holds of block {block.id} are wrong"
    assert len(block.nodes) == len(nodes), f"invariant 1: block {block.id} has a node twice"
    if len(nodes) == 1:  # this covers nearly every block, so the scan must be interruptible
        assert block.nodes[0] is nodes[0], f"invariant 1: nodes of block {block.id} are wrong"
        return
    assert {id(node) for node in block.nodes} == {id(node) for node in nodes}, (
        f"invariant 1: nodes of block {block.id} are wrong"
    )
    assert len({id(node.parent) for node in nodes}) <= 1, "invariant 4: one block under two parents"


def _check_snapshots(books: AuditedState, nodes: list[Node]) -> None:
    readers = Counter(id(lease.snapshot) for lease in books.leases if lease.snapshot is not None)
    readers.update(id(pin.snapshot) for pin in books.timed_pins if pin.snapshot is not None)
    ready: set[int] = set()
    for node in nodes:
        snapshot = node.snapshot
        if snapshot is None:
            continue
        ready.add(id(snapshot))
        assert snapshot.node is node, "invariant 5: a snapshot names another node"
        assert snapshot.position == node.end, "invariant 5: a snapshot is not at its node's end"
        assert not node.inside_span, "invariant 5: a snapshot inside a media span"
        before = snapshot.previous
        assert before is None or before.position < snapshot.position, (
            "invariant 5: the snapshot before is not before"
        )
        assert snapshot.pins == readers[id(snapshot)], "invariant 2: pins of a snapshot are wrong"
    assert ready >= readers.keys(), "invariant 5: a pinned snapshot was evicted"


def _check_rows(books: AuditedState, nodes: list[Node]) -> None:
    rows = books.ledger.rows
    expected: dict[int, RowState] = {}
    for row, state in _row_owners(books, nodes):
        assert row not in expected, f"invariant 1: row {row} has two owners"
        expected[row] = state
    for row, state in enumerate(rows.states):
        owed = expected.get(row, RowState.FREE)
        assert state is owed, f"invariant 1: row {row} is {state.value}, not {owed.value}"
    free = [row for row, state in enumerate(rows.states) if state is RowState.FREE]
    assert sorted(rows.free_rows) == free, "invariant 1: free rows are wrong"
    live = sum(state is RowState.LIVE for state in rows.states)
    assert rows.num_live == live <= rows.num_live_rows, "invariant 1: live rows are wrong"


def _row_owners(books: AuditedState, nodes: list[Node]) -> Iterator[tuple[int, RowState]]:
    """Yield every held row with the state that it must have."""
    for lease in books.leases:
        if lease.row >= 0:
            yield lease.row, RowState.LIVE
        for snapshot in lease.reserved.values():
            yield snapshot.row, RowState.RESERVED
        if lease.trailing is not None:
            yield lease.trailing.row, RowState.RESERVED
    for lease in books.parked:
        if lease.row >= 0:
            yield lease.row, RowState.PRIVATE
    for node in nodes:
        if node.snapshot is not None:
            yield node.snapshot.row, RowState.READY


def _check_candidates(ledger: Ledger, nodes: list[Node]) -> None:
    units = {id(block): priority for priority, block in ledger.units.items().values()}
    expected = {id(node.block): node.block for node in nodes if is_unit(node.block)}
    assert units.keys() == expected.keys(), "invariant 3: eviction candidates are wrong"
    assert len(ledger.units) == len(units), "invariant 3: candidate count is wrong"
    for key, block in expected.items():
        assert units[key][0] == ledger.unit_priority(block)[0], "invariant 3: class is out of date"
    spare = {id(snapshot) for snapshot in ledger.spare_snapshots}
    ready: list[Snapshot] = [node.snapshot for node in nodes if node.snapshot is not None]
    unpinned = {id(snapshot) for snapshot in ready if not snapshot.pins}
    assert spare == unpinned, "invariant 3: spare snapshots are wrong"
    assert len(ledger.spare_snapshots) == len(spare), "invariant 3: spare count is wrong"


def _check_memory(books: AuditedState, nodes: list[Node]) -> None:
    ledger = books.ledger
    keys = [lease.pending_key for lease in books.leases if lease.pending_key is not None]
    assert dict(Counter(keys)) == ledger.pending, "invariant 7: keys in flight are wrong"
    for ghosts in (ledger.evicted_nodes, ledger.evicted_snapshots):
        assert len(ghosts) <= ghosts.limit, "the memory of evicted keys is bounded"
    num_bytes = 0
    for node in nodes:
        if node.experts is not None:
            assert len(node.experts) == node.num_tokens, "expert rows do not cover their node"
            num_bytes += node.experts.nbytes
    assert ledger.expert_bytes == num_bytes, "bytes of expert rows are wrong"
    check_rows(ledger.logprobs, nodes)
