"""Deltas on their way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from vlm_serve.engine.requests.outputs import Delta, FinishReason
from vlm_serve.server.service import PATIENT_SECONDS, Mailbox
from vlm_serve.server.unread import UnreadDeltas


async def told(queue: UnreadDeltas) -> bool:
    """Whether something has been delivered into a queue."""
    taking = asyncio.ensure_future(queue.take())
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.wait({taking})
    return not taking.cancelled()


class CountingLoop:
    """Of an event loop, what a mailbox uses; counts how often it is woken."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.wakes = 0

    def call_soon_threadsafe(self, call: Callable[..., Any]) -> Any:
        self.wakes += 1
        return self._loop.call_soon_threadsafe(call)


async def received(queue: UnreadDeltas, count: int) -> list[str]:
    deltas: list[Delta] = []
    while len(deltas) < count:
        deltas += await asyncio.wait_for(queue.take(), 20)
    return [delta.text for delta in deltas]


def test_every_queue_gets_its_deltas_in_order_from_other_threads() -> None:
    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        queues: list[UnreadDeltas] = [UnreadDeltas(10_000) for _ in range(4)]

        def engine(mine: UnreadDeltas) -> None:
            for number in range(500):
                mailbox.post(mine, Delta(0, str(number)))
                mailbox.hand_over()

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
        queue: UnreadDeltas = UnreadDeltas(10_000)
        for number in range(8):
            mailbox.post(queue, Delta(0, str(number)))
        assert loop.wakes == 0
        mailbox.hand_over()
        assert loop.wakes == 1
        assert await received(queue, 8) == [str(number) for number in range(8)]
        mailbox.post(queue, Delta(0, "next step"))
        mailbox.hand_over()
        assert loop.wakes == 2
        assert await received(queue, 1) == ["next step"]

    asyncio.run(run())


def test_what_nobody_waits_for_wakes_the_loop_now_and_then() -> None:
    async def run() -> None:
        loop = CountingLoop(asyncio.get_running_loop())
        mailbox = Mailbox(loop)  # type: ignore[arg-type]
        whole: UnreadDeltas = UnreadDeltas(10_000)
        stream: UnreadDeltas = UnreadDeltas(10_000)
        begin = time.monotonic()

        def post(text: str, after: float, reason: FinishReason | None = None) -> None:
            delta = Delta(0, text, finish_reason=reason, time=begin + after)
            mailbox.post(whole, delta, patient=True)
            mailbox.hand_over()

        post("first", 0.0)
        assert loop.wakes == 1
        assert await received(whole, 1) == ["first"]
        delivered = time.monotonic() - begin
        for number in range(5):
            post(str(number), delivered)
        assert loop.wakes == 1
        await asyncio.sleep(0)
        assert not await told(whole)
        post("late", delivered + PATIENT_SECONDS)
        assert loop.wakes == 2
        assert await received(whole, 6) == ["0", "1", "2", "3", "4", "late"]
        delivered = time.monotonic() - begin
        post("with a stream's", delivered)
        mailbox.post(stream, Delta(0, "now"))
        mailbox.hand_over()
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
    queue: UnreadDeltas = UnreadDeltas(10_000)
    loop.close()
    for _ in range(3):
        mailbox.post(queue, Delta(0, "late"))
        mailbox.hand_over()
