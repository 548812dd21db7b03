"""The contents of the cache for people: gauges and a paged listing of the trie."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlm_serve.cache.pools import RowState

if TYPE_CHECKING:
    from vlm_serve.cache.config import CacheConfig
    from vlm_serve.cache.ledger import Ledger
    from vlm_serve.cache.records import Node

HASH_CHARACTERS = 16
"""Digits of a content hash that are shown: enough to recognise a medium among thousands."""
NODE_BYTES, BYTES_PER_ID = 1300, 4
"""Memory of a node's records, here and in mirrors of the tree, and of each of its tokens' ids."""


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Gauges.

    Attributes:
        blocks, free_blocks: physical KV blocks, and the empty ones among them.
        cached_blocks: blocks that eviction can free; the rest belongs to running requests.
        nodes, tree_bytes: trie nodes, tails included, and the memory of their records.
        rows: state rows by state ("free", "live", "reserved", "ready", "private").
        touched_blocks, touched_rows: blocks and rows that have been in use at least once.
        expert_bytes, logprob_bytes: size of the routed expert rows, and of the kept prompt
            log-probabilities.
    """

    blocks: int
    free_blocks: int
    cached_blocks: int
    nodes: int
    tree_bytes: int
    rows: dict[str, int]
    touched_blocks: int
    touched_rows: int
    expert_bytes: int
    logprob_bytes: int


@dataclass(frozen=True, slots=True)
class ListedNode:
    """A node as of one batch of changes. Counters (pins, hits, sizes) are read from the node
    itself, by any thread, and may be newer.

    Attributes:
        node: with its immutable place; read-only.
        root: key of its root.
        snapshot: kind of the state at its end, or None.
    """

    node: Node
    root: bytes
    snapshot: str | None = None


@dataclass(frozen=True, slots=True)
class MediaInfo:
    """A media span that starts in a node.

    Attributes:
        offset: of its first token, from the node's start.
        length: in tokens; the span may continue in further nodes.
        kind: "image" or "video".
        hash: the first digits of its content hash, hexadecimal.
    """

    offset: int
    length: int
    kind: str
    hash: str


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node.

    Attributes:
        key, parent: hexadecimal keys; a child of the root names the root key.
        start, end: positions covered.
        tail: it covers only the first tokens of a block.
        block: physical block.
        pins, hits: current users, and uses so far.
        exact: computed by prefill alone.
        media: the media spans that start in it.
        snapshot: kind of the snapshot at its end, or None.
        snapshot_hits: requests that started from that snapshot.
        tier: its location: "device".
        num_bytes: of its share of the block, the snapshot, the expert rows and the
            log-probabilities.
    """

    key: str
    parent: str
    start: int
    end: int
    tail: bool
    block: int
    pins: int
    hits: int
    exact: bool
    media: tuple[MediaInfo, ...]
    snapshot: str | None
    snapshot_hits: int
    tier: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TreePage:
    """Nodes `[offset, offset + len(nodes))` of `total`, parents before children."""

    total: int
    offset: int
    nodes: tuple[NodeInfo, ...]


def usage(ledger: Ledger) -> CacheUsage:
    states, nodes = Counter(ledger.rows.states), ledger.trie.num_nodes
    return CacheUsage(
        blocks=ledger.config.num_blocks,
        free_blocks=ledger.blocks.num_free,
        cached_blocks=ledger.blocks.num_reclaimable,
        nodes=nodes,
        tree_bytes=nodes * (NODE_BYTES + ledger.config.block_size * BYTES_PER_ID),
        rows={state.value: states[state] for state in RowState},
        touched_blocks=ledger.blocks.num_touched,
        touched_rows=ledger.rows.num_touched,
        expert_bytes=ledger.expert_bytes,
        logprob_bytes=ledger.logprobs.num_bytes,
    )


def describe(config: CacheConfig, entry: ListedNode) -> NodeInfo:
    """Return the current information about a node. Any thread may call it."""
    node, has_snapshot = entry.node, entry.snapshot is not None
    num_bytes = config.block_bytes * node.num_tokens // config.block_size
    num_bytes += config.snapshot_bytes if has_snapshot else 0
    for rows in (node.experts, node.logprobs):
        num_bytes += rows.nbytes if rows is not None else 0
    snapshot = node.snapshot
    return NodeInfo(
        key=node.key.hex(),
        parent=node.parent.key.hex(),
        start=node.end - node.num_tokens,
        end=node.end,
        tail=node.num_tokens < config.block_size,
        block=node.block.id,
        pins=node.pins,
        hits=node.hits,
        exact=node.exact,
        media=tuple(
            [
                MediaInfo(
                    media.offset,
                    media.length,
                    media.kind,
                    media.content_hash.hex()[:HASH_CHARACTERS],
                )
                for media in node.media
            ]
        ),
        snapshot=entry.snapshot,
        snapshot_hits=snapshot.hits if has_snapshot and snapshot is not None else 0,
        tier="device",
        num_bytes=num_bytes,
    )
