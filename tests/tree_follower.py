"""The cache's tree as its mirror shows it and as its changes tell it, beside the tree itself."""

from __future__ import annotations

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.listing import ListedNode, NodeInfo, describe
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.cache.records import Branch, Node
from vlm_serve.engine.features.mirror import Change, TreeMirror

Facts = tuple[NodeInfo, bytes]
"""Of a node: what is told of it, and its root's key."""


class Follower:
    """The tree as a reader knows it who was told it once and has followed the changes since."""

    def __init__(self, cache: PrefixCache, limit: int) -> None:
        self._cache = cache
        self.mirror = TreeMirror(cache.events, limit)
        self._following = self.mirror.following()
        self._following.__enter__()
        self.times_read = 0
        self._read()

    def _read(self) -> None:
        whole = self.mirror.listing()
        self._sequence = whole.sequence
        self.nodes = {entry.node.key: _facts(entry, self._cache.config) for entry in whole.entries}
        self.times_read += 1

    def follow(self) -> None:
        """Hears what a step has changed."""
        self.mirror.publish()
        self.mirror.publish_use()
        found = self.mirror.since(self._sequence)
        if found is None:
            self._read()
        else:
            self._sequence, changes = found
            for change in changes:
                self._apply(change)

    def check(self) -> None:
        """What the mirror shows, and what its changes tell, is what there is."""
        self.follow()
        tree = tree_of(self._cache)
        shown, seen = self.mirror.listing().entries, set[bytes]()
        for entry in shown:
            parent = entry.node.parent
            assert parent.key in seen or parent.key == entry.root, "a child before its parent"
            seen.add(entry.node.key)
        told = {entry.node.key: _facts(entry, self._cache.config) for entry in shown}
        assert told == tree, "the mirror shows another tree"
        assert self.nodes == tree, "the changes tell of another tree"

    def _apply(self, change: Change) -> None:
        if change.kind == "node_added":
            assert change.key not in self.nodes and change.entry is not None
            self.nodes[change.key] = _facts(change.entry, self._cache.config)
        elif change.kind == "node_evicted":
            del self.nodes[change.key]
        elif change.kind == "hit":
            hit = change.hit
            assert hit is not None and hit.boundary < hit.prompt_tokens and hit.root
            assert bool(hit.key) == bool(hit.boundary)
        else:
            assert change.entry is not None
            known = self.nodes[change.key][0].snapshot
            if change.kind == "snapshot_ready":
                assert known is None and change.snapshot
            elif change.kind == "snapshot_evicted":
                assert known is not None and change.snapshot is None
            else:
                assert change.kind == "pinned"
            self.nodes[change.key] = _facts(change.entry, self._cache.config)


def _facts(entry: ListedNode, config: CacheConfig) -> Facts:
    return describe(config, entry), entry.root


def tree_of(cache: PrefixCache) -> dict[bytes, Facts]:
    """The tree itself."""
    entries: list[ListedNode] = []
    for node in cache.nodes():
        root: Branch = node
        while isinstance(root, Node):
            root = root.parent
        kind = node.snapshot.kind if node.snapshot is not None else None
        entries.append(ListedNode(node, root.key, kind))
    return {entry.node.key: _facts(entry, cache.config) for entry in entries}
