"""The prefix trie: one node per full block, and tails that end at cut points within a block."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from vlm_serve.cache.records import NO_MEDIA, Branch, Node

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vlm_serve.preprocess.identity.keys import PromptKeys


class Trie:
    """Nodes by chained key, one root per root key (weights, dtypes, tenant).

    Keys are chained, so a node's key names its whole prefix.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.roots: dict[bytes, Branch] = {}
        self.nodes: dict[bytes, Node] = {}
        """Every node by its key, tails included."""
        self.media_starts: dict[tuple[bytes, int], int] = {}
        """(parent key, media offset) -> nodes: tells another medium from other text."""

    def root(self, key: bytes) -> Branch | None:
        return self.roots.get(key)

    def insert(self, node: Node) -> None:
        """Add a node under its parent; a new root is entered with its first node."""
        branch = node.parent
        assert branch.end == branch.depth * self.block_size, "a tail is a leaf"
        assert node.key not in branch.children, "the key is already in the trie"
        if branch.depth == 0:
            known = self.roots.setdefault(branch.key, branch)
            assert known is branch, "the root is entered already"
        branch.children[node.key] = node
        self.nodes[node.key] = node
        if node.media_offset != NO_MEDIA:
            place = (branch.key, node.media_offset)
            self.media_starts[place] = self.media_starts.get(place, 0) + 1

    def remove(self, node: Node) -> None:
        """Remove a leaf. An entry that names another object stays."""
        assert not node.children, "only leaves are removed"
        branch = node.parent
        assert branch.children.get(node.key) is node, "the entry names another node"
        del branch.children[node.key]
        del self.nodes[node.key]
        if branch.depth == 0 and not branch.children:
            del self.roots[branch.key]
        if node.media_offset != NO_MEDIA:
            place = (branch.key, node.media_offset)
            self.media_starts[place] -= 1
            if not self.media_starts[place]:
                del self.media_starts[place]

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def path(self, keys: PromptKeys, depth: int | None = None) -> list[Node]:
        """Return the full nodes from the root on, as deep as the prompt's keys match: at most
        `depth` of them."""
        nodes, known = self.nodes, keys.block_keys
        # A node's key covers its whole prefix, and the nodes of that stay as long as it does.
        most = len(known) if depth is None else min(depth, len(known))
        count = bisect_left(range(most), True, key=lambda index: known[index] not in nodes)
        return list(map(nodes.__getitem__, known[:count]))

    def node_at(self, path: Sequence[Node], keys: PromptKeys, cut: int) -> Node | None:
        """Return the node that ends at a cut point of a prompt; None if there is none.

        Args:
            path: the prompt's full nodes from the root on, as far as they are known.
        """
        depth, rest = divmod(cut, self.block_size)
        if depth > len(path):
            return None
        branch = path[depth - 1] if depth else self.root(keys.root)
        if rest:
            return branch.children.get(keys.tails.get(cut, b"")) if branch is not None else None
        return path[depth - 1]

    def walk(self) -> Iterator[Node]:
        """Yield every node, parents before children, siblings in order of insertion."""
        stack: list[Node] = []
        for root in self.roots.values():
            stack.extend(reversed(root.children.values()))
            while stack:
                node = stack.pop()
                yield node
                stack.extend(reversed(node.children.values()))
