"""A store that replies with more than it was asked for: lengths are compared as they stream in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from tier_entries import ORIGIN, entry

from vlm_serve.cache.tiers.shared import SharedStore
from vlm_serve.cache.tiers.shared_format import Keyring

MEBIBYTE = 1 << 20
LIES: dict[str, Callable[[], bytes]] = {
    "a text of 2 GB": lambda: b"$2000000000\r\n" + b"x" * MEBIBYTE,
    "a text of 9 TB": lambda: b"$9999999999999\r\n" + b"x" * MEBIBYTE,
    "a negative length": lambda: b"$-9999\r\n",
    "a list of lists": lambda: b"*1\r\n" * 100_000,
    "a long list": lambda: b"*2000000000\r\n" + b":1\r\n" * 100_000,
    "a long error": lambda: b"-ERR " + b"e" * MEBIBYTE + b"\r\n",
    "a long line": lambda: b"+" + b"s" * MEBIBYTE,
    "a number of many digits": lambda: b":" + b"9" * MEBIBYTE + b"\r\n",
    "a map": lambda: b"%1000000\r\n" + b"+a\r\n" * 1000,
    "a type of RESP3": lambda: b"=2000000000\r\n",
    "no protocol": lambda: bytes(range(256)) * 100,
    "nothing": lambda: b"",
}


async def asked(lie: bytes, work: Callable[[SharedStore], Any]) -> int:
    """Return how many bytes a store could send before its client has had enough."""
    sent = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while await reader.read(65536):
                for _ in range(64):
                    writer.write(lie)
                    await writer.drain()
                    sent += len(lie)
                if not lie:
                    break
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = Redis(host="127.0.0.1", port=port, retry=Retry(NoBackoff(), 1), protocol=2)
    store = SharedStore(
        client, Keyring(b"k" * 32, ORIGIN), lambda *_: None, time_limit=5.0, lifetime=100
    )
    with pytest.raises(OSError, match="more than it was asked|no store answers so|onnection|reset"):
        await asyncio.wait_for(work(store), 20)
    await store.close()
    server.close()
    await asyncio.sleep(0.01)
    return sent


@pytest.mark.parametrize("lie", LIES)
def test_nothing_is_read_that_was_not_asked_for(lie: str) -> None:
    wanted = [entry(number).id for number in range(3)]

    def look_up(store: SharedStore) -> Any:
        return store.contains(wanted)

    for work in (SharedStore.open, look_up):
        sent = asyncio.run(asked(LIES[lie](), work))
        assert sent <= 24 * MEBIBYTE
