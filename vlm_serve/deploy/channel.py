"""The channel from a replica to a gateway: one TCP connection for all answers.

A call through Ray costs milliseconds, and the tokens of all requests come several hundred times a
second. The address is passed through Ray, with keys to authenticate both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import pickle
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from vlm_serve.deploy.outbox import NumberedMessage, Outboxes

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
    """The replica's end of all channels. For one event loop.

    Args:
        outboxes: the messages to send.
        host: address to listen on.
    """

    def __init__(self, outboxes: Outboxes, host: str) -> None:
        self._outboxes = outboxes
        self._host = host
        self._listening: asyncio.Task[int] | None = None
        self._server: asyncio.Server | None = None
        self._gateways: dict[bytes, tuple[str, Address]] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}

    async def address(self, gateway: str) -> Address:
        """Return an address for one connection of a gateway."""
        if self._listening is None:
            self._listening = asyncio.ensure_future(self._listen())
        port = await self._listening
        keys = secrets.token_bytes(_KEY_BYTES), secrets.token_bytes(_KEY_BYTES)
        made = Address(self._host, port, *keys)
        self._gateways = {key: each for key, each in self._gateways.items() if each[0] != gateway}
        self._gateways[made.gateway_key] = gateway, made
        return made

    async def close(self) -> None:
        """Close all channels: gateways send unanswered requests to other replicas."""
        self._outboxes.close()
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
        outbox = self._outboxes[gateway]
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
