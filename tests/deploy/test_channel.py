"""Channels between replicas and gateways, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from vlm_serve.deploy import channel
from vlm_serve.deploy.channel import BEGUN, Channels, read_batches

HOST = "127.0.0.1"


def run(work: Callable[[Channels], Awaitable[None]]) -> None:
    async def whole() -> None:
        channels = Channels(HOST)
        await work(channels)
        await channels.close()

    asyncio.run(whole())


def test_messages_come_and_the_end_of_the_outbox_ends_the_channel() -> None:
    async def work(channels: Channels) -> None:
        batches = read_batches(await channels.address("gateway"))
        channels.outbox("gateway").put(3, BEGUN)
        assert await anext(batches) == [(3, BEGUN)]
        channels.outbox("gateway").put(3, {"type": "http.response.body", "body": b"x" * 10**6})
        ((number, message),) = await anext(batches)
        assert number == 3 and message is not None and len(message["body"]) == 10**6
        await channels.close()
        assert [each async for each in batches] in ([], [[]])

    run(work)


def test_an_idle_channel_has_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HEARTBEAT_SECONDS", 0.01)

    async def work(channels: Channels) -> None:
        batches = read_batches(await channels.address("gateway"))
        assert [await anext(batches) for _ in range(3)] == [[], [], []]

    run(work)


def test_nobody_reads_without_the_key() -> None:
    async def work(channels: Channels) -> None:
        address = await channels.address("gateway")
        channels.outbox("gateway").put(3, BEGUN)
        stranger = replace(address, gateway_key=bytes(32))
        assert [each async for each in read_batches(stranger)] == []
        assert await anext(read_batches(address)) == [(3, BEGUN)]
        assert [each async for each in read_batches(address)] == []  # once

    run(work)


def test_nothing_is_read_of_a_process_that_does_not_know_the_key() -> None:
    async def work(channels: Channels) -> None:
        address = replace(await channels.address("gateway"), replica_key=bytes(32))
        with pytest.raises(ConnectionRefusedError):
            await anext(read_batches(address))

    run(work)


def test_the_newest_channel_of_a_gateway_gets_its_messages() -> None:
    async def work(channels: Channels) -> None:
        old = read_batches(await channels.address("gateway"))
        channels.outbox("gateway").put(1, BEGUN)
        assert await anext(old) == [(1, BEGUN)]
        new = read_batches(await channels.address("gateway"))
        reading = asyncio.ensure_future(anext(new))
        assert [each async for each in old] == []
        channels.outbox("gateway").put(2, BEGUN)
        assert await reading == [(2, BEGUN)]

    run(work)
