"""Connections whose TLS handshake has not ended yet."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from vlm_serve.server.http.connection import ConnectionPool


class Handshake(asyncio.Protocol):
    """A connection from its acceptance to the end of its handshake; it counts as an idle one.

    asyncio's own TLS servers tell nobody of a connection before.

    Args:
        connections: the server's connections.
        make: makes the connection that follows.
        context: settings of TLS.
        seconds: time limit.
    """

    is_working = False
    transport: asyncio.Transport

    def __init__(
        self,
        connections: ConnectionPool,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        seconds: float,
    ) -> None:
        self._all = connections
        self._make = make
        self._context = context
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None
        self._early = bytearray()
        """What came with the handshake's end, before the connection was there to read it."""
        self._lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.pause_reading()  # all that it says is for the handshake
        self._all.admit(self)
        if not transport.is_closing():
            self._task = asyncio.ensure_future(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True

    def check(self, seconds: float) -> None:
        """Do nothing: the handshake has a time limit of its own."""

    async def _shake_hands(self) -> None:
        try:
            transport = await asyncio.get_running_loop().start_tls(
                self.transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._seconds,
            )
        except OSError:  # all errors of TLS, of time limits and of connections are
            self.transport.abort()
            return
        finally:
            self._all.forget(self)
        if transport is None or self._lost:
            return
        connection = self._make()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if self._early:
            connection.data_received(bytes(self._early))
