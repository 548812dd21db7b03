"""The boxes in which answers wait for their fronts."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from vlm_serve.deploy import box as replica_box
from vlm_serve.deploy.box import BEGUN, Box, Boxes
from vlm_serve.server.failover.attempt import TOKENS


def test_what_one_turn_gives_is_taken_at_once() -> None:
    async def work() -> None:
        box, event = Box(), asyncio.Event()

        async def send(number: int) -> None:
            await event.wait()
            box.put(number, BEGUN)

        sending = [asyncio.ensure_future(send(number)) for number in range(5)]
        taking = asyncio.ensure_future(box.take(30.0))
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
        taking = asyncio.ensure_future(box.take(30.0))
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
    monkeypatch.setattr(replica_box, "UNREAD_SECONDS", 0.0)
    boxes["new"]
    monkeypatch.undo()
    assert boxes["old"] is not old


def body(text: bytes, tokens: list[int]) -> Message:
    part = {"type": "http.response.body", "body": text, "more_body": True}
    return {**part, TOKENS: {0: tokens}}


def test_first_words_go_at_once_and_later_ones_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_box, "PACE_SECONDS", 3600.0)

    async def work() -> None:
        box = Box()
        start: Message = {"type": "http.response.start", "status": 200, "headers": []}
        for message in (BEGUN, start, body(b"one", [1])):
            box.put(7, message)
        assert await box.take(30.0) == [(7, BEGUN), (7, start), (7, body(b"one", [1]))]
        box.put(7, body(b" two", [2]))
        box.put(7, body(b" three", [3, 4]))
        taking = asyncio.ensure_future(box.take(30.0))
        await asyncio.sleep(0.05)
        assert not taking.done()
        box.put(8, body(b"other", [5]))
        assert await taking == [(7, body(b" two three", [2, 3, 4])), (8, body(b"other", [5]))]

    asyncio.run(work())


def test_the_end_of_an_answer_stays_at_its_end() -> None:
    async def work() -> None:
        box = Box()
        last: Message = {"type": "http.response.body", "body": b"", "more_body": False}
        for message in (body(b"one", [1]), body(b" two", [2]), last, None):
            box.put(7, message)
        whole = {**last, "body": b"one two", TOKENS: {0: [1, 2]}}
        assert await box.take(30.0) == [(7, whole), (7, None)]

    asyncio.run(work())
