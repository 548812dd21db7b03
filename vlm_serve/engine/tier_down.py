"""What the device evicts goes down to the lower tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from vlm_serve.cache.ledger import CacheListener
from vlm_serve.cache.rows import Snapshot
from vlm_serve.cache.tiers.entry import Entry, EntryId, Kind
from vlm_serve.cache.tiers.stack import TierStack
from vlm_serve.cache.trie import Node
from vlm_serve.engine.tier_transfer import Transfer, expert_layout

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class TierListener:
    """Hands the content of evicted nodes and snapshots to the tiers; never raises.

    Args:
        stack: the tiers.
        transfer: reads blocks and rows.
        block_size: tokens per block.
        has_state: False for a model without state layers.
        inner: told everything as well.
    """

    def __init__(
        self,
        stack: TierStack,
        transfer: Transfer,
        *,
        block_size: int,
        has_state: bool,
        inner: CacheListener,
    ) -> None:
        self._stack = stack
        self._transfer = transfer
        self._block_size = block_size
        self._has_state = has_state
        self._inner = inner
        self._silent = False

    def block_freed(self, block: int) -> None:
        self._inner.block_freed(block)

    def row_freed(self, row: int) -> None:
        self._inner.row_freed(row)

    def kv_evicted(self, node: Node) -> None:
        self._inner.kv_evicted(node)
        if not self._silent:
            self._try(self._put_node, node, 0.0)

    def snapshot_evicted(self, snapshot: Snapshot) -> None:
        self._inner.snapshot_evicted(snapshot)
        if not self._silent:
            self._try(self._put_snapshot, snapshot, 0.0)

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """What is evicted meanwhile is gone."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def save(self, node: Node, wait_seconds: float) -> None:
        """Shutdown: a copy of a node and its snapshot goes down."""
        if node.snapshot is not None:
            self._try(self._put_snapshot, node.snapshot, wait_seconds)
        self._try(self._put_node, node, wait_seconds)

    def _try(self, put: Callable[[_T, float], None], what: _T, wait_seconds: float) -> None:
        try:
            put(what, wait_seconds)
        except Exception:
            self._stack.counts["failed"] += 1
            _log.exception("an evicted entry could not be handed to the lower tiers")

    def _put_node(self, node: Node, wait_seconds: float) -> None:
        tail = node.num_tokens < self._block_size
        state = EntryId(Kind.STATE, node.key)
        if tail and self._has_state and self._stack.locate(state) is None:
            return  # no request could ever start from it
        if self._is_new(EntryId(Kind.KV, node.key)):
            payload = self._transfer.read_kv(node.block.id, node.num_tokens)
            self._put(Kind.KV, node, payload, wait_seconds)
        if node.experts is not None and self._is_new(EntryId(Kind.EXPERTS, node.key)):
            self._put(Kind.EXPERTS, node, node.experts.tobytes(), wait_seconds)

    def _put_snapshot(self, snapshot: Snapshot, wait_seconds: float) -> None:
        node = snapshot.node
        assert node is not None, "the snapshot has gone already"
        entry_id = EntryId(Kind.STATE, node.key)
        if self._is_new(entry_id):
            payload = self._transfer.read_state(snapshot.row)
            layout = self._transfer.layout(Kind.STATE, 0)
            entry = Entry(entry_id, snapshot.position, snapshot.exact, layout, payload)
            self._stack.put(entry, wait_seconds)

    def _put(self, kind: Kind, node: Node, payload: bytes, wait_seconds: float) -> None:
        if kind is Kind.EXPERTS:
            assert node.experts is not None
            layout = expert_layout(node.experts)
        else:
            layout = self._transfer.layout(kind, node.num_tokens)
        entry = Entry(EntryId(kind, node.key), node.num_tokens, node.exact, layout, payload)
        self._stack.put(entry, wait_seconds)

    def _is_new(self, entry_id: EntryId) -> bool:
        """Whether no tier has it. One that does is reminded that it was in use until now."""
        if self._stack.locate(entry_id) is None:
            return True
        self._stack.touch(entry_id)
        return False
