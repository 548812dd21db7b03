"""Freed memory goes back to the system: much of it soon, the rest when it has become quiet."""

from __future__ import annotations

import asyncio
import weakref

import pytest

from vlm_serve.server import upkeep
from vlm_serve.server.upkeep import COLLECT_BYTES, TRIM_BYTES, Trimmer


class Circle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


async def until(trimmer: Trimmer, trims: int) -> None:
    async with asyncio.timeout(30):
        while trimmer.num_trims < trims:
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(upkeep, "QUIET_SECONDS", 0.5)


def test_much_is_given_back_while_requests_go_on() -> None:
    async def work() -> None:
        trimmer = Trimmer()
        trimmer.freed(TRIM_BYTES - 1)
        trimmer.freed(1)
        await until(trimmer, 1)
        assert not trimmer.num_collections

    asyncio.run(work())


def test_cycles_of_much_are_collected_while_requests_go_on() -> None:
    async def work() -> None:
        trimmer, gone = Trimmer(), weakref.ref(Circle())
        trimmer.freed(COLLECT_BYTES - 1)
        await until(trimmer, 1)
        assert not trimmer.num_collections and gone() is not None
        trimmer.freed(1)
        async with asyncio.timeout(30):
            while not trimmer.num_collections:
                trimmer.freed(0)  # it never becomes quiet
                await asyncio.sleep(0.001)
        assert gone() is None
        trimmer.freed(TRIM_BYTES)
        await until(trimmer, trimmer.num_trims + 1)
        assert trimmer.num_collections == 1, "it counts from the last one"

    asyncio.run(work())


def test_the_rest_is_given_back_when_it_is_quiet() -> None:
    async def work() -> None:
        trimmer, gone = Trimmer(), weakref.ref(Circle())
        assert gone() is not None, "the collector has come already"
        trimmer.freed(1)
        await until(trimmer, 1)
        assert trimmer.num_collections == 1 and gone() is None
        trimmer.freed(1)
        await until(trimmer, 2)
        assert trimmer.num_collections == 2

    asyncio.run(work())
