"""The outboxes in which answers wait for their gateways."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from vlm_serve.deploy import channel as channel_module
from vlm_serve.deploy.channel import BEGUN, Channels, Outbox
from vlm_serve.server.failover.attempt import PING, TOKENS, Attempt, Delivery


def test_what_one_turn_gives_is_taken_at_once() -> None:
    async def work() -> None:
        outbox, event = Outbox(), asyncio.Event()

        async def send(number: int) -> None:
            await event.wait()
            outbox.put(number, BEGUN)

        sending = [asyncio.ensure_future(send(number)) for number in range(5)]
        taking = asyncio.ensure_future(outbox.take(30.0))
        await asyncio.sleep(0)
        event.set()
        assert [number for number, _ in await taking] == list(range(5))
        await asyncio.gather(*sending)

    asyncio.run(work())


def test_what_breaks_a_silence_is_no_part_of_an_answer() -> None:
    def part(data: bytes, **more: object) -> Message:
        return {"type": "http.response.body", "body": data, "more_body": True, **more}

    async def work() -> None:
        outbox, ping = Outbox(), part(b": waiting\n\n", **{PING: True})
        for message in (ping, ping):
            outbox.put(1, message)
        assert await outbox.take(1.0) == [(1, ping)]
        for message in (ping, part(b"a", **{TOKENS: {0: [5]}}), ping, part(b"b")):
            outbox.put(1, message)
        assert await outbox.take(1.0) == [(1, part(b"ab", **{TOKENS: {0: [5]}}))]
        delivery = Delivery(Attempt.first("r"))
        for message in (ping, part(b"ab", **{TOKENS: {0: [5]}}), ping):
            delivery.passed(message)
        assert delivery.next.delivered == 2 and delivery.next.started

    asyncio.run(work())


def test_silence_is_told_too() -> None:
    assert asyncio.run(Outbox().take(0.01)) == []


def test_a_closed_outbox_wakes_its_reader_and_accepts_nothing() -> None:
    async def work() -> None:
        outbox = Outbox()
        taking = asyncio.ensure_future(outbox.take(30.0))
        await asyncio.sleep(0)
        outbox.close()
        assert await taking == []
        outbox.put(1, BEGUN)
        assert await outbox.take(0.01) == []

    asyncio.run(work())


def test_the_outbox_of_a_gateway_that_is_gone_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channels = Channels("127.0.0.1")
    old = channels.outbox("old")
    old.put(1, BEGUN)
    assert channels.outbox("old") is old
    monkeypatch.setattr(channel_module, "UNREAD_SECONDS", 0.0)
    channels.outbox("new")
    monkeypatch.undo()
    assert channels.outbox("old") is not old


def body(text: bytes, tokens: list[int]) -> Message:
    part = {"type": "http.response.body", "body": text, "more_body": True}
    return {**part, TOKENS: {0: tokens}}


def test_first_words_go_at_once_and_later_ones_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "PACE_SECONDS", 3600.0)

    async def work() -> None:
        outbox = Outbox()
        start: Message = {"type": "http.response.start", "status": 200, "headers": []}
        for message in (BEGUN, start, body(b"one", [1])):
            outbox.put(7, message)
        assert await outbox.take(30.0) == [(7, BEGUN), (7, start), (7, body(b"one", [1]))]
        outbox.put(7, body(b" two", [2]))
        outbox.put(7, body(b" three", [3, 4]))
        taking = asyncio.ensure_future(outbox.take(30.0))
        await asyncio.sleep(0.05)
        assert not taking.done()
        outbox.put(8, body(b"other", [5]))
        assert await taking == [(7, body(b" two three", [2, 3, 4])), (8, body(b"other", [5]))]

    asyncio.run(work())


def test_the_end_of_an_answer_stays_at_its_end() -> None:
    async def work() -> None:
        outbox = Outbox()
        last: Message = {"type": "http.response.body", "body": b"", "more_body": False}
        for message in (body(b"one", [1]), body(b" two", [2]), last, None):
            outbox.put(7, message)
        whole = {**last, "body": b"one two", TOKENS: {0: [1, 2]}}
        assert await outbox.take(30.0) == [(7, whole), (7, None)]

    asyncio.run(work())
