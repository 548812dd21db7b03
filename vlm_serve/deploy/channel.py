"""The channel from a replica to a gateway: one TCP connection for all answers.

A call through Ray costs milliseconds, and the tokens of all requests come several hundred times a
second. The address is passed through Ray, with keys to authenticate both sides.

A replica has an outbox for each gateway. The output of a step for one gateway is one batch. After a
request's first text, its messages of a few milliseconds are merged into one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import pickle
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from starlette.types import Message

from vlm_serve.server.failover.attempt import PING, merged

HEARTBEAT_SECONDS = 1.0
GREETING_SECONDS = 5.0
"""Time limit for a new connection to present its key."""
_KEY_BYTES = 32
_SIZE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Address:
    """Address at which a gateway reads its messages.

    Attributes:
        gateway_key: authenticates the gateway.
        replica_key: authenticates the replica; checked before anything else is read from it.
    """

    host: str
    port: int
    gateway_key: bytes = field(repr=False)
    replica_key: bytes = field(repr=False)


class Channels:
    """The replica's end of all channels, with an outbox for each gateway. For one event loop.

    Args:
        host: address to listen on.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._outboxes: dict[str, Outbox] = {}
        self._listening: asyncio.Task[int] | None = None
        self._server: asyncio.Server | None = None
        self._gateways: dict[bytes, tuple[str, Address]] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}

    def outbox(self, gateway: str) -> Outbox:
        """Return the messages to send to a gateway."""
        if gateway not in self._outboxes:
            oldest = time.monotonic() - UNREAD_SECONDS
            kept = {
                name: outbox for name, outbox in self._outboxes.items() if outbox.read >= oldest
            }
            self._outboxes = kept | {gateway: Outbox()}
        return self._outboxes[gateway]

    async def address(self, gateway: str) -> Address:
        """Return an address for one connection of a gateway."""
        if self._listening is None:
            self._listening = asyncio.ensure_future(self._listen())
        port = await self._listening
        keys = secrets.token_bytes(_KEY_BYTES), secrets.token_bytes(_KEY_BYTES)
        address = Address(self._host, port, *keys)
        self._gateways = {
            key: known for key, known in self._gateways.items() if known[0] != gateway
        }
        self._gateways[address.gateway_key] = gateway, address
        return address

    async def close(self) -> None:
        """Close all channels: gateways send unanswered requests to other replicas."""
        for outbox in self._outboxes.values():
            outbox.close()
        if self._server is not None:
            self._server.close()
        if self._sending:
            await asyncio.wait(self._sending.values(), timeout=HEARTBEAT_SECONDS)

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                presented = await reader.readexactly(_KEY_BYTES)
            known = [key for key in self._gateways if hmac.compare_digest(key, presented)]
            if not known:
                return
            gateway, address = self._gateways.pop(known[0])
            writer.write(address.replica_key)
            if gateway in self._sending:  # a connection that the gateway has given up
                self._sending[gateway].cancel()
            sending = self._sending[gateway] = asyncio.ensure_future(self._send(gateway, writer))
            await asyncio.wait({sending})
            if self._sending.get(gateway) is sending:
                del self._sending[gateway]
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def _send(self, gateway: str, writer: asyncio.StreamWriter) -> None:
        outbox = self.outbox(gateway)
        with contextlib.suppress(ConnectionError):
            while not outbox.closed:
                batch = await outbox.take(HEARTBEAT_SECONDS)
                frame = pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)
                writer.write(len(frame).to_bytes(_SIZE_BYTES, "big"))
                writer.write(frame)
                await writer.drain()


async def read_batches(address: Address) -> AsyncIterator[Sequence[NumberedMessage]]:
    """Yield batches of messages until the channel ends.

    An empty batch is the heartbeat of an idle second, so silence means trouble. Raises OSError if
    there is no connection.
    """
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(address.gateway_key)
        presented = await reader.readexactly(_KEY_BYTES)
        if not hmac.compare_digest(presented, address.replica_key):
            raise ConnectionRefusedError("another process listens there")
        while True:
            size = int.from_bytes(await reader.readexactly(_SIZE_BYTES), "big")
            yield pickle.loads(await reader.readexactly(size))
    except asyncio.IncompleteReadError:
        return
    finally:
        writer.close()


PACE_SECONDS = 0.01
"""Least time between two batches, unless the next one has the first text of a request."""
UNREAD_SECONDS = 60.0
"""An outbox unread for this long belongs to a gateway that is gone, and is dropped."""

NumberedMessage = tuple[int, Message | None]
"""A request's number and a message of its answer; None ends the answer."""

BEGUN: Message = {"type": "vlm_serve.begun"}
"""First message of every request: it tells the gateway which replica has the request."""
ORDER = "vlm_serve.order"
"""Key of a scope: the name under which an update of weights waits for a decision."""
READY_TYPE = "vlm_serve.ready"
"""Type of the message that a replica has read other weights, whose digest is in `weights`."""


class Outbox:
    """Queue of messages for one gateway. For one event loop.

    Attributes:
        read: monotonic time of the gateway's last read.
        closed: nothing more comes; waiting readers are woken.
    """

    def __init__(self) -> None:
        self.read = time.monotonic()
        self.closed = False
        self._messages: dict[int, list[Message | None]] = {}
        self._with_text: set[int] = set()
        self._sent = 0.0
        self._filled = asyncio.Event()
        self._urgent = asyncio.Event()

    def put(self, number: int, message: Message | None) -> None:
        if self.closed:
            return
        self._messages.setdefault(number, []).append(message)
        if message is None:
            self._with_text.discard(number)
        elif number not in self._with_text and message.get("body") and not message.get(PING):
            self._with_text.add(number)
            self._urgent.set()
        self._filled.set()

    def close(self) -> None:
        self.closed = True
        self._filled.set()
        self._urgent.set()

    async def take(self, seconds: float) -> list[NumberedMessage]:
        """Take all queued messages, in order within each request; none after the timeout."""
        self.read = time.monotonic()
        if not await _wait(self._filled, seconds):
            return []
        await _wait(self._urgent, self._sent + PACE_SECONDS - time.monotonic())
        await asyncio.sleep(0)  # lets the other requests of the same step queue their messages
        self._sent = time.monotonic()
        self._filled.clear()
        self._urgent.clear()
        queued, self._messages = self._messages, {}
        return [
            (number, merged) for number, messages in queued.items() for merged in _merge(messages)
        ]


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most so long. Return True if it is set."""
    if not event.is_set() and seconds > 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
    return event.is_set()


def _merge(messages: Sequence[Message | None]) -> list[Message | None]:
    """Merge the parts of a body into one message."""
    parts = [message for message in messages if message and message["type"] == "http.response.body"]
    if len(parts) < 2:
        return list(messages)
    head = messages[: messages.index(parts[0])]
    return [*head, merged(parts), *([None] if messages[-1] is None else [])]
