"""The prefix trie: one node per full block, and tails that end at cut points within a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlm_serve.cache.blocks import Block
    from vlm_serve.cache.experts import Rows
    from vlm_serve.cache.rows import Snapshot

NO_MEDIA = -1


class Branch:
    """A root, or the part of a node that its children see.

    Attributes:
        key: the root key, or the node's chained 32-byte key.
        children: full nodes and tails by key. Keys cover the number of tokens, so the two kinds
            never collide.
        depth: blocks on the path from the root, this one included.
        end: position after the last token covered.
    """

    __slots__ = ("children", "depth", "end", "key")

    def __init__(self, key: bytes, depth: int, end: int) -> None:
        self.key = key
        self.children: dict[bytes, Node] = {}
        self.depth = depth
        self.end = end


class Node(Branch):
    """The KV of one block (or of a block's first tokens: a tail, always a leaf).

    Attributes:
        parent: the node before it, or the root.
        num_tokens: tokens covered; fewer than a block for a tail.
        block: the physical block that holds the KV rows.
        pins: running requests (and timed pins) that rely on the node.
        parked: suspended requests that do.
        snapshot: the state at exactly `end`, if there is one.
        exact: the KV was made by prefill alone, on an exact prefix.
        hits: requests that used the node.
        last_used, credit: the counter and the policy's age when it was used last.
        media_offset: offset in the block of the first media span that starts in it, or NO_MEDIA.
        inside_span: `end` lies strictly inside a media span: no snapshot belongs here.
        experts: routed expert rows `[num_tokens, layers, top_k]`, if known.
    """

    __slots__ = (
        "block",
        "credit",
        "exact",
        "experts",
        "hits",
        "inside_span",
        "last_used",
        "media_offset",
        "num_tokens",
        "parent",
        "parked",
        "pins",
        "snapshot",
    )

    def __init__(self, key: bytes, parent: Branch, num_tokens: int, block: Block) -> None:
        super().__init__(key, parent.depth + 1, parent.end + num_tokens)
        self.parent = parent
        self.num_tokens = num_tokens
        self.block = block
        self.pins = 0
        self.parked = 0
        self.snapshot: Snapshot | None = None
        self.exact = True
        self.hits = 0
        self.last_used = 0
        self.credit = 0.0
        self.media_offset = NO_MEDIA
        self.inside_span = False
        self.experts: Rows | None = None


class Trie:
    """Nodes by chained key, one root per root key (weights, dtypes, tenant).

    Keys are chained, so a node's key names its whole prefix.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.roots: dict[bytes, Branch] = {}
        self.num_nodes = 0
        self.media_starts: dict[tuple[bytes, int], int] = {}
        """(parent key, media offset) -> nodes: tells another medium from other text."""

    def root(self, key: bytes) -> Branch | None:
        return self.roots.get(key)

    def insert(self, node: Node) -> None:
        """Adds a node under its parent; a new root is entered with its first node."""
        branch = node.parent
        assert branch.end == branch.depth * self.block_size, "a tail is a leaf"
        assert node.key not in branch.children, "the key is already in the trie"
        if branch.depth == 0:
            known = self.roots.setdefault(branch.key, branch)
            assert known is branch, "the root is entered already"
        branch.children[node.key] = node
        self.num_nodes += 1
        if node.media_offset != NO_MEDIA:
            place = (branch.key, node.media_offset)
            self.media_starts[place] = self.media_starts.get(place, 0) + 1

    def remove(self, node: Node) -> None:
        """Takes a leaf out. An entry that names another object stays."""
        assert not node.children, "only leaves are removed"
        branch = node.parent
        assert branch.children.get(node.key) is node, "the entry names another node"
        del branch.children[node.key]
        self.num_nodes -= 1
        if branch.depth == 0 and not branch.children:
            del self.roots[branch.key]
        if node.media_offset != NO_MEDIA:
            place = (branch.key, node.media_offset)
            self.media_starts[place] -= 1
            if not self.media_starts[place]:
                del self.media_starts[place]

    def is_full(self, node: Node) -> bool:
        return node.num_tokens == self.block_size

    def walk(self) -> Iterator[Node]:
        """Every node, parents before children, in order of insertion among siblings."""
        stack: list[Node] = []
        for root in self.roots.values():
            stack.extend(reversed(root.children.values()))
            while stack:
                node = stack.pop()
                yield node
                stack.extend(reversed(node.children.values()))
