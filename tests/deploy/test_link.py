"""Links between replicas and fronts, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from vlm_serve.deploy import link
from vlm_serve.deploy.box import BEGUN, Boxes
from vlm_serve.deploy.link import Links, letters_at

HOST = "127.0.0.1"


def run(work: Callable[[Boxes, Links], Awaitable[None]]) -> None:
    async def whole() -> None:
        boxes = Boxes()
        links = Links(boxes, HOST)
        await work(boxes, links)
        await links.close()

    asyncio.run(whole())


def test_letters_come_and_the_end_of_the_box_ends_the_link() -> None:
    async def work(boxes: Boxes, links: Links) -> None:
        batches = letters_at(await links.address("front"))
        boxes["front"].put(3, BEGUN)
        assert await anext(batches) == [(3, BEGUN)]
        boxes["front"].put(3, {"type": "http.response.body", "body": b"x" * 10**6})
        ((number, message),) = await anext(batches)
        assert number == 3 and message is not None and len(message["body"]) == 10**6
        await links.close()
        assert [each async for each in batches] in ([], [[]])

    run(work)


def test_a_link_says_every_second_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HEARTBEAT_SECONDS", 0.01)

    async def work(boxes: Boxes, links: Links) -> None:
        batches = letters_at(await links.address("front"))
        assert [await anext(batches) for _ in range(3)] == [[], [], []]

    run(work)


def test_nobody_reads_without_the_key() -> None:
    async def work(boxes: Boxes, links: Links) -> None:
        address = await links.address("front")
        boxes["front"].put(3, BEGUN)
        stranger = replace(address, front_key=bytes(32))
        assert [each async for each in letters_at(stranger)] == []
        assert await anext(letters_at(address)) == [(3, BEGUN)]
        assert [each async for each in letters_at(address)] == []  # once

    run(work)


def test_nothing_is_read_of_a_process_that_does_not_know_the_key() -> None:
    async def work(boxes: Boxes, links: Links) -> None:
        address = replace(await links.address("front"), replica_key=bytes(32))
        with pytest.raises(ConnectionRefusedError):
            await anext(letters_at(address))

    run(work)


def test_the_newest_link_of_a_front_gets_its_letters() -> None:
    async def work(boxes: Boxes, links: Links) -> None:
        old = letters_at(await links.address("front"))
        boxes["front"].put(1, BEGUN)
        assert await anext(old) == [(1, BEGUN)]
        new = letters_at(await links.address("front"))
        reading = asyncio.ensure_future(anext(new))
        assert [each async for each in old] == []
        boxes["front"].put(2, BEGUN)
        assert await reading == [(2, BEGUN)]

    run(work)
