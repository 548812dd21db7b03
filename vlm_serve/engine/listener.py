"""Bridges from the cache's book-keeping to the tensors of the executor."""

from __future__ import annotations

from vlm_serve.cache.rows import Snapshot
from vlm_serve.cache.trie import Node
from vlm_serve.engine.local_executor import LocalExecutor


class PoisonListener:
    """Fills whatever is freed with NaN, so that a stale read shows in every result (tests)."""

    def __init__(self, executor: LocalExecutor) -> None:
        self._executor = executor

    def block_freed(self, block: int) -> None:
        self._executor.poison_freed((block,), ())

    def row_freed(self, row: int) -> None:
        self._executor.poison_freed((), (row,))

    def kv_evicted(self, node: Node) -> None:
        pass

    def snapshot_evicted(self, snapshot: Snapshot) -> None:
        pass
