"""The boxes in which answers wait for their fronts."""

from __future__ import annotations

import asyncio

import pytest

from vlm_serve.deploy import replica
from vlm_serve.deploy.replica import BEGUN, Box, Boxes


def test_what_one_turn_gives_is_taken_at_once() -> None:
    async def work() -> None:
        box, event = Box(), asyncio.Event()

        async def send(number: int) -> None:
            await event.wait()
            box.put(number, BEGUN)

        sending = [asyncio.ensure_future(send(number)) for number in range(5)]
        taking = asyncio.ensure_future(box.take(10.0))
        await asyncio.sleep(0)
        event.set()
        assert [number for number, _ in await taking] == list(range(5))
        await asyncio.gather(*sending)

    asyncio.run(work())


def test_silence_is_told_too() -> None:
    assert asyncio.run(Box().take(0.01)) == []


def test_a_closed_box_wakes_who_waits_and_takes_nothing_in() -> None:
    async def work() -> None:
        box = Box()
        taking = asyncio.ensure_future(box.take(10.0))
        await asyncio.sleep(0)
        box.close()
        assert await taking == []
        box.put(1, BEGUN)
        assert await box.take(0.01) == []

    asyncio.run(work())


def test_the_box_of_a_front_that_has_gone_is_thrown_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boxes = Boxes()
    old = boxes["old"]
    old.put(1, BEGUN)
    assert boxes["old"] is old
    monkeypatch.setattr(replica, "UNREAD_SECONDS", 0.0)
    boxes["new"]
    monkeypatch.undo()
    assert boxes["old"] is not old
