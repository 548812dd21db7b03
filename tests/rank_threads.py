"""Ranks as threads of one process: they meet in the same shared memory as processes would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from vlm_serve.kernels.ranks import SharedRanks
from vlm_serve.kernels.ranks.shared import SharedMemory

_T = TypeVar("_T")


def on_ranks(
    size: int, work: Callable[[SharedRanks], _T], *, slot_bytes: int = 1 << 20, limit: float = 60
) -> list[_T | BaseException]:
    """What `work` returns or raises on each rank. A rank that raises gives up its step."""
    memory = SharedMemory.create(size, slot_bytes)
    results: list[_T | BaseException] = [RuntimeError("never ran")] * size

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        ranks = SharedRanks(rank, memory, limit=limit)
        try:
            results[rank] = work(ranks)
        except BaseException as error:
            ranks.abort()
            results[rank] = error

    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        memory.unlink()
    return results
