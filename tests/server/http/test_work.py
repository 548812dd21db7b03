"""Requests are counted in and out, and a server that drains waits for them, but not for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from vlm_serve.server.config import ServerConfig
from vlm_serve.server.work import Work

PATIENCE = 20.0


class Counting(Work):
    """Only what every server's work has."""

    def end_streams(self) -> None:
        raise AssertionError("nobody asked for that")

    async def close(self) -> None:
        raise AssertionError("nobody asked for that")


def with_work(test: Callable[[Counting], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(test(Counting(ServerConfig())), PATIENCE)

    asyncio.run(run())


def test_requests_are_counted_also_when_they_fail() -> None:
    async def test(work: Counting) -> None:
        with work.counted(), work.counted():
            assert work.num_open == 2
        with contextlib.suppress(ValueError), work.counted():
            raise ValueError
        assert work.num_open == 0

    with_work(test)


def test_draining_without_requests_is_done_at_once() -> None:
    async def test(work: Counting) -> None:
        assert not work.draining
        assert await work.drain(0.0)
        assert work.draining

    with_work(test)


def test_draining_waits_for_the_last_request() -> None:
    async def test(work: Counting) -> None:
        first, second = contextlib.ExitStack(), contextlib.ExitStack()
        first.enter_context(work.counted())
        second.enter_context(work.counted())
        drained = asyncio.create_task(work.drain(PATIENCE))
        await asyncio.sleep(0)
        first.close()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not drained.done() and work.draining
        second.close()
        assert await drained

    with_work(test)


def test_one_that_has_ended_before_is_no_reason_to_stop_waiting() -> None:
    """The sign of an earlier end must not be taken for the end of what runs now."""

    async def test(work: Counting) -> None:
        with work.counted():
            pass
        with work.counted():
            assert not await work.drain(0.01)
        assert await work.drain(0.01)

    with_work(test)


@pytest.mark.parametrize("timeout", [0.0, 0.01])
def test_what_does_not_end_in_time_is_told(timeout: float) -> None:
    async def test(work: Counting) -> None:
        with work.counted():
            assert not await work.drain(timeout)
            assert work.num_open == 1

    with_work(test)
