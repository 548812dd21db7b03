"""Moves entries evicted from the device to the lower tiers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.events import CacheEvents
from vlm_serve.cache.marks import KnownMarks
from vlm_serve.cache.placement import NEAR_END
from vlm_serve.cache.records import Node, Snapshot
from vlm_serve.cache.tiers.entry import Kind
from vlm_serve.cache.tiers.mark_records import record_beside
from vlm_serve.cache.tiers.stack import TierStack
from vlm_serve.cache.tiers.transfer import Transfer, read_entry

_log = logging.getLogger(__name__)


class TierSaver:
    """Passes the content of evicted nodes and snapshots to the tiers.

    Args:
        stack: the tiers.
        transfer: reads blocks and rows.
        config: of the cache.
        marks: the cut points that prompts have brought.
    """

    def __init__(
        self, stack: TierStack, transfer: Transfer, config: CacheConfig, marks: KnownMarks
    ) -> None:
        self._stack = stack
        self._transfer = transfer
        self._config = config
        self._marks = marks
        self._wait_seconds = 0.0
        self._silent = False

    def listen(self, events: CacheEvents) -> None:
        """Start saving evicted entries."""
        events.node_evicted.subscribe(self._put_node)
        events.snapshot_evicted.subscribe(self._put_snapshot)

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Drop entries evicted within the block."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def save(self, node: Node, wait_seconds: float) -> None:
        """Save a copy of a node and its snapshot. Never raises; waits for space in the queue."""
        self._wait_seconds = wait_seconds
        try:
            if node.snapshot is not None:
                self._put_snapshot(node.snapshot)
            self._put_node(node)
        except Exception:
            self._stack.counts["failed"] += 1
            _log.exception("content of the device could not be handed to the lower tiers")
        self._wait_seconds = 0.0

    def _put_node(self, node: Node) -> None:
        tail = node.num_tokens < self._config.block_size
        state = self._stack.origin.id(Kind.STATE, node.key)
        if tail and self._config.has_state and not self._stack.holds(state):
            return  # no request could start from it
        self._put(Kind.KV, node.key, node)
        if node.experts is not None:
            self._put(Kind.EXPERTS, node.key, node)
        record = record_beside(node, self._marks, self._stack.origin)
        # A shared store has the records of all servers: one's own would hide them.
        if record is not None and self._stack.shared is None and not self._silent:
            self._stack.put(record, self._wait_seconds)

    def _put_snapshot(self, snapshot: Snapshot) -> None:
        assert snapshot.node is not None, "the snapshot has gone already"
        if snapshot.kind == NEAR_END and not snapshot.hits:
            return  # such states are kept only where they cost nothing
        self._put(Kind.STATE, snapshot.node.key, snapshot)

    def _put(self, kind: Kind, key: bytes, source: Node | Snapshot) -> None:
        """Hand an entry to the tiers. One that has it is told that it was in use until now."""
        if self._silent:
            return
        entry_id = self._stack.origin.id(kind, key)
        if self._stack.holds(entry_id):
            self._stack.touch(entry_id)
            return
        entry = read_entry(self._transfer, entry_id, source)
        assert entry is not None, "the source has gone already"
        self._stack.put(entry, self._wait_seconds)
