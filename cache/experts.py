"""Routed expert rows of mixture-of-experts models, stored with the KV of their tokens.

Rows are numpy arrays `[tokens, layers, top_k]` of expert ids. They are not part of a node's
identity: a node created without rows gets them when its tokens are computed again.

docs/architecture.md#routed-experts
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vlm_serve.cache.records import Lease, Node, Rows

if TYPE_CHECKING:
    from vlm_serve.cache.ledger import Ledger
    from vlm_serve.preprocess.identity.keys import PromptKeys

__all__ = ["ExpertPiece", "Rows", "cached_rows", "record", "seed"]


@dataclass(frozen=True, slots=True)
class ExpertPiece:
    """Rows of tokens `[start, end)`; None if they were never recorded."""

    start: int
    end: int
    rows: Rows | None


def seed(lease: Lease, block_size: int) -> None:
    """Copy the rows between the last block boundary and the lease's start into the lease."""
    index, rest = divmod(lease.boundary, block_size)
    if rest == 0:
        return
    source = lease.tail.experts if lease.tail is not None else None
    if source is None and index < len(lease.path):
        source = lease.path[index].experts
    if source is not None:
        lease.expert_seed = source[:rest]
        lease.expert_rows = [lease.expert_seed]


def cached_rows(lease: Lease, block_size: int) -> tuple[ExpertPiece, ...]:
    """Return the rows of all tokens that were cached when the lease was opened, in order and
    without holes."""
    depth, rest = divmod(lease.boundary, block_size)
    pieces = [
        ExpertPiece(index * block_size, (index + 1) * block_size, node.experts)
        for index, node in enumerate(lease.path[:depth])
    ]
    if rest:
        pieces.append(ExpertPiece(depth * block_size, lease.boundary, lease.expert_seed))
    return tuple(pieces)


def record(ledger: Ledger, lease: Lease, keys: PromptKeys, end: int, rows: Rows) -> None:
    """Store the rows of tokens `[lease.length, end)` with the nodes that have none yet. There may
    be rows of further tokens.

    Call it after the nodes up to `end` are published and before the lease's length advances.
    """
    block_size, start = ledger.config.block_size, lease.length
    assert len(rows) >= end - start, "one row per computed token"
    position = start
    while position < end:
        block_end = position // block_size * block_size + block_size
        stop = min(end, block_end)
        if lease.expert_rows is not None:
            lease.expert_rows.append(rows[position - start : stop - start].copy())
            _fill(ledger, lease, keys, position, stop)
        if stop == block_end:
            lease.expert_rows = []
        position = stop


def _fill(ledger: Ledger, lease: Lease, keys: PromptKeys, start: int, stop: int) -> None:
    """Store the lease's rows of one block in the nodes that end in `(start, stop]`."""
    targets = _nodes_without_rows(ledger, lease, keys, start, stop)
    if not targets or lease.expert_rows is None:
        return
    rows = np.concatenate(lease.expert_rows)
    for node in targets:
        kept = rows[: node.num_tokens].copy()
        kept.flags.writeable = False
        node.experts = kept
        ledger.expert_bytes += kept.nbytes
        ledger.used(node)


def _nodes_without_rows(
    ledger: Ledger, lease: Lease, keys: PromptKeys, start: int, stop: int
) -> list[Node]:
    cuts = keys.cuts[bisect_right(keys.cuts, start) : bisect_right(keys.cuts, stop)]
    nodes = [ledger.trie.node_at(lease.path, keys, cut) for cut in cuts]
    return [node for node in nodes if node is not None and node.experts is None]
