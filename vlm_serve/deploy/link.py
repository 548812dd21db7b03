"""The link from a replica to a front: a connection of their own, on which all answers travel.

A call through Ray costs milliseconds; the tokens of all requests come several hundred times a
second. Who may connect is told through Ray, with a key that proves it to both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import pickle
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from vlm_serve.deploy.box import Boxes, Letter

HEARTBEAT_SECONDS = 1.0
GREETING_SECONDS = 5.0
"""That who connects has to show the key."""
_KEY_BYTES = 32
_SIZE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Address:
    """Where a front reads its letters.

    Attributes:
        front_key: by which the front is known.
        replica_key: by which the replica is known, before anything that it says is read.
    """

    host: str
    port: int
    front_key: bytes = field(repr=False)
    replica_key: bytes = field(repr=False)


class Links:
    """The replica's end of all links. Everything is on one event loop.

    Args:
        boxes: what is sent.
        host: address to listen on.
    """

    def __init__(self, boxes: Boxes, host: str) -> None:
        self._boxes = boxes
        self._host = host
        self._listening: asyncio.Task[int] | None = None
        self._server: asyncio.Server | None = None
        self._fronts: dict[bytes, tuple[str, Address]] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}

    async def address(self, front: str) -> Address:
        """For one connection of a front."""
        if self._listening is None:
            self._listening = asyncio.ensure_future(self._listen())
        port = await self._listening
        keys = secrets.token_bytes(_KEY_BYTES), secrets.token_bytes(_KEY_BYTES)
        made = Address(self._host, port, *keys)
        self._fronts = {key: each for key, each in self._fronts.items() if each[0] != front}
        self._fronts[made.front_key] = front, made
        return made

    async def close(self) -> None:
        """Says no more: fronts take what is unanswered elsewhere."""
        self._boxes.close()
        if self._server is not None:
            self._server.close()
        if self._sending:
            await asyncio.wait(self._sending.values(), timeout=HEARTBEAT_SECONDS)

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._greet, self._host, 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                shown = await reader.readexactly(_KEY_BYTES)
            known = [key for key in self._fronts if hmac.compare_digest(key, shown)]
            if not known:
                return
            front, address = self._fronts.pop(known[0])
            writer.write(address.replica_key)
            if front in self._sending:  # a connection that the front has given up
                self._sending[front].cancel()
            sending = self._sending[front] = asyncio.ensure_future(self._send(front, writer))
            await asyncio.wait({sending})
            if self._sending.get(front) is sending:
                del self._sending[front]
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def _send(self, front: str, writer: asyncio.StreamWriter) -> None:
        box = self._boxes[front]
        with contextlib.suppress(ConnectionError):
            while not box.closed:
                letters = await box.take(HEARTBEAT_SECONDS)
                frame = pickle.dumps(letters, pickle.HIGHEST_PROTOCOL)
                writer.write(len(frame).to_bytes(_SIZE_BYTES, "big"))
                writer.write(frame)
                await writer.drain()


async def letters_at(address: Address) -> AsyncIterator[Sequence[Letter]]:
    """The batches that come there, until the link ends; an empty one every second in which there
    is nothing, so that silence means trouble. Raises OSError if there is no link."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(address.front_key)
        shown = await reader.readexactly(_KEY_BYTES)
        if not hmac.compare_digest(shown, address.replica_key):
            raise ConnectionRefusedError("another process listens there")
        while True:
            size = int.from_bytes(await reader.readexactly(_SIZE_BYTES), "big")
            yield pickle.loads(await reader.readexactly(size))
    except asyncio.IncompleteReadError:
        return
    finally:
        writer.close()
