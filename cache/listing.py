"""What the cache holds, for people: gauges and a paged listing of the trie."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from vlm_serve.cache.records import NO_MEDIA, Node
from vlm_serve.cache.rows import RowState

if TYPE_CHECKING:
    from vlm_serve.cache.ledger import Ledger


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Gauges.

    Attributes:
        blocks, free_blocks: physical KV blocks, and those that hold nothing.
        cached_blocks: blocks that eviction can free; the rest belongs to running requests.
        nodes: trie nodes, tails included.
        rows: state rows by state ("free", "live", "reserved", "ready", "private").
        expert_bytes, logprob_bytes: size of the routed expert rows, and of the kept prompt
            log-probabilities.
    """

    blocks: int
    free_blocks: int
    cached_blocks: int
    nodes: int
    rows: dict[str, int]
    expert_bytes: int
    logprob_bytes: int


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node.

    Attributes:
        key, parent: hexadecimal keys; a child of the root names the root key.
        start, end: positions covered.
        tail: it covers only the first tokens of a block.
        block: physical block.
        pins, hits: users now, and so far.
        exact: made by prefill alone.
        media: a media span starts in it.
        snapshot: kind of the snapshot at its end, or None.
        snapshot_hits: requests that started from that snapshot.
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
    media: bool
    snapshot: str | None
    snapshot_hits: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TreePage:
    """Nodes `[offset, offset + len(nodes))` of `total`, parents before children."""

    total: int
    offset: int
    nodes: tuple[NodeInfo, ...]


def usage(ledger: Ledger) -> CacheUsage:
    states = Counter(ledger.rows.states)
    return CacheUsage(
        blocks=ledger.config.num_blocks,
        free_blocks=ledger.blocks.num_free,
        cached_blocks=ledger.blocks.num_reclaimable,
        nodes=ledger.trie.num_nodes,
        rows={state.value: states[state] for state in RowState},
        expert_bytes=ledger.expert_bytes,
        logprob_bytes=ledger.logprobs.num_bytes,
    )


def tree_page(ledger: Ledger, offset: int, limit: int) -> TreePage:
    nodes = islice(ledger.trie.walk(), offset, offset + limit)
    return TreePage(ledger.trie.num_nodes, offset, tuple(_describe(ledger, n) for n in nodes))


def _describe(ledger: Ledger, node: Node) -> NodeInfo:
    config, snapshot = ledger.config, node.snapshot
    num_bytes = config.block_bytes * node.num_tokens // config.block_size
    num_bytes += config.snapshot_bytes if snapshot is not None else 0
    for rows in (node.experts, node.logprobs):
        num_bytes += rows.nbytes if rows is not None else 0
    return NodeInfo(
        key=node.key.hex(),
        parent=node.parent.key.hex(),
        start=node.end - node.num_tokens,
        end=node.end,
        tail=not ledger.trie.is_full(node),
        block=node.block.id,
        pins=node.pins,
        hits=node.hits,
        exact=node.exact,
        media=node.media_offset != NO_MEDIA,
        snapshot=snapshot.kind if snapshot is not None else None,
        snapshot_hits=snapshot.hits if snapshot is not None else 0,
        num_bytes=num_bytes,
    )
