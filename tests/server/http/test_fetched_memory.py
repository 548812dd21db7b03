"""Media that are fetched wait for room in the budget of requests, and give it back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from vlm_serve.errors import OverloadedError
from vlm_serve.server.http.request_memory import FetchedMemory, RequestMemory, Share
from vlm_serve.system.stopping import Stop, StoppedError


class Fetcher:
    """A thread that holds bytes until it is let go."""

    def __init__(self, fetched: FetchedMemory, *sizes: int) -> None:
        self.stop = Stop()
        self.go = threading.Event()
        pool = ThreadPoolExecutor(1)

        def work() -> None:
            with fetched.holding(self.stop) as hold:
                for size in sizes:
                    hold(size)
                assert self.go.wait(30)

        self.done: Future[None] = pool.submit(work)
        pool.shutdown(wait=False)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def run(work: Callable[[RequestMemory, FetchedMemory], object], seconds: float = 30.0) -> None:
    async def inside() -> None:
        memory = RequestMemory(1000)
        fetched = FetchedMemory(memory, asyncio.get_running_loop(), seconds)
        await asyncio.wait_for(work(memory, fetched), 60)  # type: ignore[arg-type]
        assert memory.held == 0

    asyncio.run(inside())


def test_what_is_held_counts_from_the_first_byte_to_the_last() -> None:
    async def work(memory: RequestMemory, fetched: FetchedMemory) -> None:
        fetcher = Fetcher(fetched, 100, 200)
        await until(lambda: memory.held == 300)
        fetcher.go.set()
        await asyncio.wrap_future(fetcher.done)
        await until(lambda: memory.held == 0)

    run(work)


def test_a_fetch_waits_for_bodies_and_bodies_for_a_fetch() -> None:
    async def work(memory: RequestMemory, fetched: FetchedMemory) -> None:
        body, later = Share(memory), Share(memory)
        await body.grow(700)
        first = Fetcher(fetched, 100)
        await until(lambda: memory.held == 800)
        # Beyond the budget there is one, the first that waited; it is not the second one.
        second, third = Fetcher(fetched, 900), Fetcher(fetched, 901)
        await until(lambda: memory.held in (1700, 1701))
        waiting = asyncio.ensure_future(later.grow(500))
        await asyncio.sleep(0.02)
        assert memory.held in (1700, 1701) and not waiting.done()
        body.leave()
        for each in (first, second, third):
            each.go.set()
        for each in (first, second, third):
            await asyncio.wrap_future(each.done)
        await waiting
        await until(lambda: memory.held == 500)
        later.leave()

    run(work)


async def full(memory: RequestMemory) -> tuple[Share, Share]:
    """A budget of which nothing is left, not even for one beyond it."""
    body, beyond = Share(memory), Share(memory)
    await body.grow(750)
    await beyond.grow(800)
    assert memory.held == 1550
    return body, beyond


def test_who_gives_up_while_waiting_is_woken() -> None:
    async def work(memory: RequestMemory, fetched: FetchedMemory) -> None:
        shares = await full(memory)
        fetcher = Fetcher(fetched, 600)
        await until(lambda: len(memory._waiting) == 1)
        fetcher.stop.set()
        with pytest.raises(StoppedError):
            await asyncio.wrap_future(fetcher.done)
        for share in shares:
            share.leave()

    run(work)


def test_who_waits_too_long_is_refused() -> None:
    async def work(memory: RequestMemory, fetched: FetchedMemory) -> None:
        shares = await full(memory)
        with pytest.raises(OverloadedError, match="no memory for fetching media"):
            await asyncio.wrap_future(Fetcher(fetched, 600).done)
        for share in shares:
            share.leave()

    run(work, seconds=0.05)
