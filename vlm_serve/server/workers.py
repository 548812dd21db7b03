"""The threads and processes of a server in one table, and its own thread pools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, TypeVar

from vlm_serve.server.http.request_memory import call_in_loop, current_share

_T = TypeVar("_T")

LARGE_REQUEST_BYTES = 1 << 16
"""A request that holds more memory than this is prepared in the pool `large`."""


class WorkerGroup(NamedTuple):
    """One row of the table.

    Attributes:
        kind: "pool" is a thread pool of `Workers`; threads and processes have other owners.
        name: prefix of the threads' names; for processes the module that they run.
        number: how many there are at most.
        runs: what runs in them.
    """

    kind: Literal["pool", "thread", "process"]
    name: str
    number: int | str
    runs: str


def worker_table(preprocess_threads: int) -> tuple[WorkerGroup, ...]:
    """Return all groups of threads and processes of a server.

    Args:
        preprocess_threads: the server's option of that name.
    """
    small, large = preprocess_threads, large_threads(preprocess_threads)
    return (
        WorkerGroup("pool", "prepare", small, "templates and tokenizing of small requests"),
        WorkerGroup("pool", "large", large, "the same for large requests"),
        WorkerGroup("pool", "waiting", 16, "preparation that itself waits for its media"),
        WorkerGroup("pool", "json", 1, "parsing and validating large bodies"),
        WorkerGroup("pool", "grammar", 1, "waiting for the grammar compiler"),
        WorkerGroup("thread", "MainThread", 1, "the event loop: connections, routes, streams"),
        WorkerGroup("thread", "asyncio", "min(32, CPUs + 4)", "calls that wait for the engine"),
        WorkerGroup("thread", "OtelBatchSpanRecordProcessor", 1, "exporting traces"),
        WorkerGroup("thread", "vlm-serve-engine", 1, "scheduler, cache and forward passes"),
        WorkerGroup("thread", "vlm-serve-end", 1, "waiting for the engine's end"),
        WorkerGroup("thread", "vlm-serve-send", 1, "telling the engine's process"),
        WorkerGroup("thread", "vlm-serve-receive", 1, "what the engine's process tells"),
        WorkerGroup("thread", "vlm-serve-calls", 32, "what the engine's process asks"),
        WorkerGroup("thread", "vlm-serve-fetch", 64, "downloading media"),
        WorkerGroup("thread", "vlm-serve-media", 64, "waiting for media decoders"),
        WorkerGroup("thread", "vlm-serve-reload", 4, "loading media again for the engine"),
        WorkerGroup("thread", "vlm-serve-adapter", 1, "laying out adapters"),
        WorkerGroup("thread", "vlm-serve-turns", 1, "rendering conversations with their answers"),
        WorkerGroup("thread", "vlm-serve-weights", "1 a rank", "reading other weights"),
        WorkerGroup("thread", "vlm-serve-tiers", 1, "event loop of the lower cache tiers"),
        WorkerGroup("thread", "open-", "1 a tier", "opening a lower cache tier"),
        WorkerGroup("thread", "disk", "1 an operation", "reading and writing the disk tier"),
        WorkerGroup(
            "process", "vlm_serve.preprocess.media.decode_worker", "4 + 3", "decoding media"
        ),
        WorkerGroup("process", "vlm_serve.grammar.worker", 1, "compiling grammars"),
        WorkerGroup("process", "vlm_serve.engine.remote.worker", 1, "an engine of its own"),
        WorkerGroup(
            "process",
            "vlm_serve.engine.steps.ranks.worker",
            "tensor_parallel_size - 1",
            "other ranks",
        ),
    )


def large_threads(preprocess_threads: int) -> int:
    """Return the number of threads for preparing large requests."""
    return max(1, preprocess_threads // 2)


class Workers:
    """The thread pools of one server.

    Args:
        preprocess_threads: the server's option of that name.
    """

    def __init__(self, preprocess_threads: int) -> None:
        self._pools: dict[str, ThreadPoolExecutor] = {}
        for group in worker_table(preprocess_threads):
            if group.kind == "pool":
                assert isinstance(group.number, int)
                pool = ThreadPoolExecutor(group.number, thread_name_prefix=group.name)
                self._pools[group.name] = pool

    @property
    def grammar(self) -> ThreadPoolExecutor:
        """The pool for waiting for the grammar compiler."""
        return self._pools["grammar"]

    async def prepare(self, work: Callable[[], _T]) -> _T:
        """Run blocking work of a request's preparation.

        If the caller is cancelled, started work finishes unseen. Large requests have threads of
        their own, so that short ones never wait behind them.
        """
        share = current_share()
        large = share is not None and share.size > LARGE_REQUEST_BYTES
        return await self._run("large" if large else "prepare", work)

    async def wait(self, work: Callable[[], _T]) -> _T:
        """Run work that waits for media, outside the preparation threads."""
        return await self._run("waiting", work)

    async def parse(self, work: Callable[[], _T]) -> _T:
        """Run work that holds the interpreter lock for long.

        One at a time: several would alternate, and everything else would wait for all of them.
        """
        return await self._run("json", work)

    async def _run(self, name: str, work: Callable[[], _T]) -> _T:
        """Run work in a pool; the request's memory share is kept until it ends or is dropped."""
        pending = [work]  # the pool's queue keeps items that were cancelled before they began
        future = self._pools[name].submit(lambda: pending.pop()())
        share = current_share()
        if share is not None:
            share.add_user()
            loop = asyncio.get_running_loop()
            future.add_done_callback(lambda _: call_in_loop(loop, share.leave))
        try:
            return await asyncio.wrap_future(future)
        finally:
            pending.clear()

    def shutdown(self) -> None:
        """Drop queued work, without waiting for running work."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
