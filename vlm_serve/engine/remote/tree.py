"""The mirror of the cache's tree in the process that asks. The engine's process tells of changes
and counters, and they are repeated here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from itertools import starmap
from operator import attrgetter
from typing import Any, cast

from vlm_serve.cache.events import CacheEvents
from vlm_serve.cache.listing import ListedNode, NodeInfo, describe
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.cache.records import Hit, Node, Snapshot
from vlm_serve.engine.features.mirror import TreeMirror
from vlm_serve.engine.remote.peer import Peer

_values_of = attrgetter(*(each.name for each in fields(NodeInfo)))
Values = tuple[Any, ...]
"""Of a `NodeInfo`."""
_NODES, _SNAPSHOTS = ("node_added", "node_evicted"), ("snapshot_ready", "snapshot_evicted")


class TreeTeller:
    """A feature of the engine that tells of the tree's changes.

    Args:
        cache: whose tree it is.
        mirror: the engine's own, which has published before this does.
        peer: the connection.
    """

    def __init__(self, cache: PrefixCache, mirror: TreeMirror, peer: Peer) -> None:
        self._cache, self._mirror, self._peer = cache, mirror, peer
        self._pending: list[tuple[str, Any, str | None]] = []
        self._used: dict[Node, None] = {}
        for name in _NODES:
            getattr(cache.events, name).subscribe(partial(self._note, name))
        for name in _SNAPSHOTS:
            getattr(cache.events, name).subscribe(partial(self._note_snapshot, name))
        cache.events.hit.subscribe(partial(self._note, "hit"))

    def _note(self, name: str, event: Node | Hit) -> None:
        self._pending.append((name, event, None))

    def _note_snapshot(self, name: str, snapshot: Snapshot) -> None:
        kind = snapshot.kind if name == "snapshot_ready" else None
        self._pending.append((name, snapshot.node, kind))

    def on_published(self) -> None:
        """Tell of what has changed, with the next batch."""
        if self._pending:
            pending, self._pending = self._pending, []
            self._peer.add("tree", [self._plain(*each) for each in pending])

    def _plain(self, name: str, event: Any, kind: str | None) -> tuple[str, Any, Any]:
        if name == "hit":
            return name, event, None
        values = self._values(ListedNode(event, b"", kind))
        return name, values, event.packed_tokens if name == "node_added" else kind

    def _values(self, entry: ListedNode) -> Values:
        return _values_of(describe(self._cache.config, entry))

    # -- on other threads --------------------------------------------------------------------------

    def nodes(self, keys: Sequence[bytes] | None) -> list[Values]:
        """Describe nodes that are there, None: all of them."""
        known = self._mirror.listing().entries if keys is None else map(self._mirror.find, keys)
        return [self._values(entry) for entry in known if entry is not None]

    def follow(self, follows: bool) -> None:
        """Note from now on which nodes are used, or no longer."""
        topic = self._cache.events.node_used
        topic.unsubscribe(self._touch)
        if follows:
            topic.subscribe(self._touch)

    def _touch(self, node: Node) -> None:
        self._used[node] = None

    def tell_use(self) -> None:
        """Tell of the nodes that were used since the last time."""
        used = list[bytes]()
        with suppress(KeyError):  # no more of them
            while True:
                used.append(self._used.popitem()[0].key)
        self._peer.tell("used", self.nodes(used))


class MirroredNode:
    """A node of the other process, as far as a mirror and its readers know it.

    Attributes:
        info: as it was told last.
    """

    __slots__ = ("end", "info", "key", "num_tokens", "packed_tokens", "parent")

    def __init__(self, info: NodeInfo, packed_tokens: bytes) -> None:
        self.key = bytes.fromhex(info.key)
        self.parent = _Parent(bytes.fromhex(info.parent))
        self.end, self.num_tokens = info.end, info.end - info.start
        self.packed_tokens, self.info = packed_tokens, info


@dataclass(frozen=True, slots=True)
class _Parent:
    key: bytes


@dataclass(frozen=True, slots=True)
class _MirroredSnapshot:
    node: Any
    kind: str | None


class RemoteMirror(TreeMirror):
    """A mirror of a tree in another process.

    Args:
        peer: the connection.
    """

    def __init__(self, peer: Peer) -> None:
        self._sources = CacheEvents()
        super().__init__(self._sources)
        self._peer = peer
        self._nodes: dict[bytes, MirroredNode] = {}
        self.told: dict[str, Callable[..., None]] = {"tree": self._repeat, "used": self._use}

    @contextmanager
    def following(self) -> Iterator[None]:
        """See `TreeMirror.following`."""
        with super().following():
            self._peer.tell("follow", True)
            try:
                yield
            finally:
                self._peer.tell("follow", self._followers > 1)

    def publish_use(self) -> None:
        """Ask for the nodes that were used; they are published when they are told."""
        self._peer.tell("use")

    def refresh(self, entries: Iterable[ListedNode] | None = None) -> None:
        """See `TreeMirror.refresh`."""
        keys = None if entries is None else [entry.node.key for entry in entries]
        self._read(self._peer.ask("nodes", keys))

    def _read(self, told: Iterable[Values]) -> list[MirroredNode]:
        """Take over what is told of nodes; return those that are known."""
        known = list[MirroredNode]()
        for info in starmap(NodeInfo, told):
            node = self._nodes.get(bytes.fromhex(info.key))
            if node is not None:
                node.info = info
                known.append(node)
        return known

    def _use(self, told: Iterable[Values]) -> None:
        for node in self._read(told):
            self._sources.node_used.publish(cast("Node", node))
        self.publish()
        super().publish_use()

    def _repeat(self, events: Iterable[tuple[str, Any, Any]]) -> None:
        for name, what, more in events:
            if name == "hit":
                self._sources.hit.publish(what)
                continue
            if name == "node_added":
                node = MirroredNode(NodeInfo(*what), more)
                self._nodes[node.key] = node
            else:
                node = self._nodes[bytes.fromhex(what[0])]
                node.info = NodeInfo(*what)
            if name == "node_evicted":
                del self._nodes[node.key]
            told: Any = _MirroredSnapshot(node, more) if name in _SNAPSHOTS else node
            getattr(self._sources, name).publish(told)
        self.publish()
