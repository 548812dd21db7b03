"""Mirror of the cache's tree for other threads, so that they need not involve the cache's thread.

It is updated from the cache's events. The cache's thread publishes all changes of a step at once.
Readers copy the list of nodes, or follow the changes by number. In few numbers, the mirror also
tells what the cache has gained, lost and found in the last minutes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from vlm_serve.cache.events import CacheEvents
from vlm_serve.cache.listing import ListedNode
from vlm_serve.cache.records import Hit, Node, Snapshot

MAX_KEPT = 200
"""Maximum number of entries kept, each of about 300 bytes."""
SECONDS = 300.0
"""Older entries are not returned."""
ChangeKind = Literal[
    "node_added", "node_evicted", "snapshot_ready", "snapshot_evicted", "hit", "pinned"
]
MAX_CHANGES = 8192
"""Maximum number of changes kept for followers."""


@dataclass(frozen=True, slots=True)
class PastChange:
    """Changes of one kind in one batch, below one root.

    Attributes:
        time: when they were published, in monotonic seconds.
        root: root key of the nodes, or of the prompt.
        kind: see `mirror.ChangeKind`.
        num_nodes: number of nodes concerned; 0 for a hit.
        num_tokens: tokens in these nodes; 0 for a hit.
        hit: the hit, for "hit".
    """

    time: float
    root: bytes
    kind: str
    num_nodes: int = 0
    num_tokens: int = 0
    hit: Hit | None = None


class RecentChanges:
    """The latest changes; the cache's thread adds them, and any thread reads them.

    Args:
        clock: returns monotonic seconds.
        limit: maximum number of entries kept.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, limit: int = MAX_KEPT) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: deque[PastChange] = deque(maxlen=limit)

    def add(self, hits: Iterable[Hit], changed: Iterable[tuple[bytes, str, Node]]) -> None:
        """Add one batch.

        Args:
            hits: look-ups of requests.
            changed: root key, kind of change and node of each other change.
        """
        now = self._clock()
        nodes: Counter[tuple[bytes, str]] = Counter()
        tokens: Counter[tuple[bytes, str]] = Counter()
        for root, kind, node in changed:
            nodes[root, kind] += 1
            tokens[root, kind] += node.num_tokens
        with self._lock:
            self._kept.extend(PastChange(now, hit.root, "hit", hit=hit) for hit in hits)
            self._kept.extend(
                PastChange(now, root, kind, number, tokens[root, kind])
                for (root, kind), number in nodes.items()
            )

    def latest(self, roots: Container[bytes] | None = None) -> list[tuple[float, PastChange]]:
        """Return the entries with their ages in seconds, oldest first.

        Args:
            roots: return only the entries below these roots; None: all entries.
        """
        with self._lock:
            kept, now = list(self._kept), self._clock()
        aged = ((max(0.0, now - change.time), change) for change in kept)
        return [
            (age, change)
            for age, change in aged
            if age <= SECONDS and (roots is None or change.root in roots)
        ]


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the tree.

    Attributes:
        kind: type of change; "pinned" means that the node's pins, hits or size have changed.
        key: key of the node concerned; empty for a miss.
        root: root key of the node, or of the prompt.
        entry: the node, unless it was evicted or there is none.
        snapshot: kind of the snapshot, for "snapshot_ready".
        hit: the hit, for "hit".
    """

    kind: ChangeKind
    key: bytes
    root: bytes
    entry: ListedNode | None = None
    snapshot: str | None = None
    hit: Hit | None = None


@dataclass(frozen=True, slots=True)
class TreeListing:
    """All nodes, parents before children, as of a batch of changes."""

    sequence: int
    entries: tuple[ListedNode, ...]


class TreeMirror:
    """Mirror of one cache's tree, written by the cache's thread and read by any thread.

    Without followers, only the list of nodes and a summary of the last minutes are kept.

    Args:
        events: events of a cache that is still empty.
        limit: maximum number of changes kept.

    Attributes:
        sequence: number of the last batch of changes; 0 before the first one.
        recent: the changes of the last minutes, in few numbers.
    """

    def __init__(self, events: CacheEvents, limit: int = MAX_CHANGES) -> None:
        self.sequence = 0
        self.recent = RecentChanges()
        self._events = events
        self._limit = limit
        self._lock = threading.Lock()
        self._entries: dict[bytes, ListedNode] = {}
        # Used by the cache's thread only, until it publishes them:
        self._pending: list[tuple[ChangeKind, Node, str | None] | Hit] = []
        self._touched: dict[Node, None] = {}
        # For followers:
        self._followers = 0
        self._used: dict[Node, None] = {}
        self._batches: deque[tuple[int, tuple[Change, ...]]] = deque()
        self._num_kept = 0
        self._complete_since = 0
        events.node_added.subscribe(self._node_added)
        events.node_evicted.subscribe(self._node_evicted)
        events.snapshot_ready.subscribe(self._snapshot_ready)
        events.snapshot_evicted.subscribe(self._snapshot_evicted)
        events.hit.subscribe(self._pending.append)

    # Called by any thread

    def listing(self) -> TreeListing:
        """Return all nodes."""
        with self._lock:
            return TreeListing(self.sequence, tuple(self._entries.values()))

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self._entries)

    def find(self, key: bytes) -> ListedNode | None:
        """Return the node with this key, if any."""
        return self._entries.get(key)

    def refresh(self, entries: Iterable[ListedNode] | None = None) -> None:
        """Read the counters of nodes again where they are copies, None: of all nodes. May block."""

    @contextmanager
    def following(self) -> Iterator[None]:
        """Keep changes for a follower within this context."""
        with self._lock:
            self._followers += 1
            if self._followers == 1:
                self._events.node_used.subscribe(self._touch)
        try:
            yield
        finally:
            with self._lock:
                self._followers -= 1
                if not self._followers:
                    self._events.node_used.unsubscribe(self._touch)
                    self._used.clear()
                    self._batches.clear()
                    self._num_kept = 0
                    self._complete_since = self.sequence

    def since(self, sequence: int) -> tuple[int, tuple[Change, ...]] | None:
        """Return the number of the last batch and the changes after batch `sequence`, oldest first.
        Return None if some of them are gone or the number is unknown: the reader must get the
        listing again."""
        with self._lock:
            if not self._complete_since <= sequence <= self.sequence:
                return None
            missed: list[tuple[Change, ...]] = []
            for number, changes in reversed(self._batches):
                if number <= sequence:
                    break
                missed.append(changes)
            return self.sequence, tuple([change for batch in reversed(missed) for change in batch])

    def publish_use(self) -> None:
        """Publish to followers the nodes with changed pins, hits or sizes, as one batch."""
        with self._lock:
            used, self._used = self._used, {}
            known = ((node, self._entries.get(node.key)) for node in used)
            changes = tuple(
                [
                    Change("pinned", node.key, entry.root, entry)
                    for node, entry in known
                    if entry is not None and entry.node is node
                ]
            )
            if changes:
                self._add_batch(changes)

    # Called by the cache's thread

    def publish(self) -> None:
        """Publish what has changed since the last call, as one batch."""
        if not self._pending and not self._touched:
            return
        with self._lock:
            if self._followers:
                self._used |= self._touched
            if self._pending:
                changes = tuple([self._apply(pending) for pending in self._pending])
                self._add_batch(changes)
                self._remember(changes)
        self._pending.clear()
        self._touched.clear()

    def _touch(self, node: Node) -> None:
        self._touched[node] = None

    def _node_added(self, node: Node) -> None:
        self._pending.append(("node_added", node, None))

    def _node_evicted(self, node: Node) -> None:
        self._pending.append(("node_evicted", node, None))

    def _snapshot_ready(self, snapshot: Snapshot) -> None:
        self._pending.append(("snapshot_ready", _node_of(snapshot), snapshot.kind))

    def _snapshot_evicted(self, snapshot: Snapshot) -> None:
        self._pending.append(("snapshot_evicted", _node_of(snapshot), None))

    def _apply(self, event: tuple[ChangeKind, Node, str | None] | Hit) -> Change:
        if isinstance(event, Hit):
            return Change("hit", event.key, event.root, hit=event)
        kind, node, snapshot = event
        if kind == "node_evicted":
            return Change(kind, node.key, self._entries.pop(node.key).root)
        if kind == "node_added":
            parent = self._entries.get(node.parent.key)
            entry = ListedNode(node, parent.root if parent is not None else node.parent.key)
        else:
            entry = ListedNode(node, self._entries[node.key].root, snapshot)
        self._entries[node.key] = entry
        return Change(kind, node.key, entry.root, entry, snapshot)

    def _remember(self, changes: tuple[Change, ...]) -> None:
        nodes = [pending for pending in self._pending if not isinstance(pending, Hit)]
        roots = [change.root for change in changes if change.hit is None]
        self.recent.add(
            (change.hit for change in changes if change.hit is not None),
            ((root, kind, node) for root, (kind, node, _) in zip(roots, nodes, strict=True)),
        )

    def _add_batch(self, changes: tuple[Change, ...]) -> None:
        self.sequence += 1
        if not self._followers:
            self._complete_since = self.sequence
            return
        self._batches.append((self.sequence, changes))
        self._num_kept += len(changes)
        while self._num_kept > self._limit:
            self._complete_since, gone = self._batches.popleft()
            self._num_kept -= len(gone)


def _node_of(snapshot: Snapshot) -> Node:
    assert snapshot.node is not None, "events are only emitted for snapshots of a node"
    return snapshot.node
