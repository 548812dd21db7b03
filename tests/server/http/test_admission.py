"""Requests are counted in and out, and a server that drains waits for them, but not for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from vlm_serve.engine.requests.tenant import NOBODY
from vlm_serve.server.http.admission import OpenRequests

PATIENCE = 20.0


def with_requests(test: Callable[[OpenRequests], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(test(OpenRequests()), PATIENCE)

    asyncio.run(run())


def test_requests_are_counted_also_when_they_fail() -> None:
    async def test(requests: OpenRequests) -> None:
        with requests.counted(NOBODY), requests.counted(NOBODY):
            assert requests.num_open == 2
        with contextlib.suppress(ValueError), requests.counted(NOBODY):
            raise ValueError
        assert requests.num_open == 0

    with_requests(test)


def test_draining_without_requests_is_done_at_once() -> None:
    async def test(requests: OpenRequests) -> None:
        assert not requests.draining
        assert await requests.drain(0.0)
        assert requests.draining

    with_requests(test)


def test_draining_waits_for_the_last_request() -> None:
    async def test(requests: OpenRequests) -> None:
        first, second = contextlib.ExitStack(), contextlib.ExitStack()
        first.enter_context(requests.counted(NOBODY))
        second.enter_context(requests.counted(NOBODY))
        drained = asyncio.create_task(requests.drain(PATIENCE))
        await asyncio.sleep(0)
        first.close()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not drained.done() and requests.draining
        second.close()
        assert await drained

    with_requests(test)


def test_one_that_has_ended_before_is_no_reason_to_stop_waiting() -> None:
    """The sign of an earlier end must not be taken for the end of what runs now."""

    async def test(requests: OpenRequests) -> None:
        with requests.counted(NOBODY):
            pass
        with requests.counted(NOBODY):
            assert not await requests.drain(0.01)
        assert await requests.drain(0.01)

    with_requests(test)


@pytest.mark.parametrize("timeout", [0.0, 0.01])
def test_what_does_not_end_in_time_is_told(timeout: float) -> None:
    async def test(requests: OpenRequests) -> None:
        with requests.counted(NOBODY):
            assert not await requests.drain(timeout)
            assert requests.num_open == 1

    with_requests(test)
