"""Deltas on their way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from vlm_serve.engine.requests.outputs import Delta, FinishReason
from vlm_serve.server.service import PATIENT_SECONDS, Mailbox


class CountingLoop:
    """Of an event loop, what a mailbox uses; counts how often it is woken."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.wakes = 0

    def call_soon_threadsafe(self, call: Callable[..., Any]) -> Any:
        self.wakes += 1
        return self._loop.call_soon_threadsafe(call)


async def received(queue: asyncio.Queue[Delta], count: int) -> list[str]:
    return [(await asyncio.wait_for(queue.get(), 20)).text for _ in range(count)]


def test_every_queue_gets_its_deltas_in_order_from_other_threads() -> None:
    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        queues: list[asyncio.Queue[Delta]] = [asyncio.Queue() for _ in range(4)]

        def engine(mine: asyncio.Queue[Delta]) -> None:
            for number in range(500):
                mailbox.post(mine, Delta(0, str(number)))

        threads = [threading.Thread(target=engine, args=(queue,)) for queue in queues]
        for thread in threads:
            thread.start()
        for queue in queues:
            assert await received(queue, 500) == [str(number) for number in range(500)]
        for thread in threads:
            await asyncio.to_thread(thread.join)

    asyncio.run(run())


def test_a_whole_step_wakes_the_loop_once() -> None:
    async def run() -> None:
        loop = CountingLoop(asyncio.get_running_loop())
        mailbox = Mailbox(loop)  # type: ignore[arg-type]
        queue: asyncio.Queue[Delta] = asyncio.Queue()
        for number in range(8):
            mailbox.post(queue, Delta(0, str(number)))
        assert loop.wakes == 1
        assert await received(queue, 8) == [str(number) for number in range(8)]
        mailbox.post(queue, Delta(0, "next step"))
        assert loop.wakes == 2
        assert await received(queue, 1) == ["next step"]

    asyncio.run(run())


def test_what_nobody_waits_for_wakes_the_loop_now_and_then() -> None:
    async def run() -> None:
        loop = CountingLoop(asyncio.get_running_loop())
        mailbox = Mailbox(loop)  # type: ignore[arg-type]
        whole: asyncio.Queue[Delta] = asyncio.Queue()
        stream: asyncio.Queue[Delta] = asyncio.Queue()
        begin = time.monotonic()

        def post(text: str, after: float, reason: FinishReason | None = None) -> None:
            delta = Delta(0, text, finish_reason=reason, time=begin + after)
            mailbox.post(whole, delta, patient=True)

        post("first", 0.0)
        assert loop.wakes == 1
        assert await received(whole, 1) == ["first"]
        delivered = time.monotonic() - begin
        for number in range(5):
            post(str(number), delivered)
        assert loop.wakes == 1
        await asyncio.sleep(0)
        assert whole.empty()
        post("late", delivered + PATIENT_SECONDS)
        assert loop.wakes == 2
        assert await received(whole, 6) == ["0", "1", "2", "3", "4", "late"]
        delivered = time.monotonic() - begin
        post("with a stream's", delivered)
        mailbox.post(stream, Delta(0, "now"))
        assert loop.wakes == 3
        assert await received(stream, 1) == ["now"]
        assert await received(whole, 1) == ["with a stream's"]
        post("kept", time.monotonic() - begin)
        post("last", time.monotonic() - begin, "stop")
        assert loop.wakes == 4
        assert await received(whole, 2) == ["kept", "last"]

    asyncio.run(run())


def test_posting_to_a_loop_that_is_closed_is_no_error() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    queue: asyncio.Queue[Delta] = asyncio.Queue()
    loop.close()
    for _ in range(3):
        mailbox.post(queue, Delta(0, "late"))
    assert queue.empty()
