"""All connections of a server: their limit, and the clock of their deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.connection import Connection, ConnectionPool, OpenConnection

_log = logging.getLogger(__name__)

TICKS_PER_DEADLINE = 8
MAX_TICK_SECONDS = 1.0
SPARE_DESCRIPTORS = 128
"""Descriptors reserved for media, tiers, decoders and files."""
MIN_CONNECTIONS = 8
LOG_SECONDS = 60.0


class Connections:
    """The open connections of one server.

    Attributes:
        config: the server's options.
        clock: seconds, counted in ticks of the event loop, so that a blocked loop does not run
            down the clients' deadlines.
        most: limit of open connections.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.clock = 0.0
        self.most = config.max_connections
        self._open: OrderedDict[OpenConnection, None] = OrderedDict()  # least recently active first
        shortest = min(config.header_timeout, config.send_timeout)
        self._tick = min(MAX_TICK_SECONDS, shortest / TICKS_PER_DEADLINE)
        self._relieved = -1.0
        self._logged = -LOG_SECONDS

    def __len__(self) -> int:
        return len(self._open)

    def protocol(self, **arguments: Any) -> Connection:
        """Make a connection; uvicorn calls this as its protocol class."""
        return Connection(self, **arguments)

    def handshake(
        self, make: Callable[[], asyncio.Protocol], context: ssl.SSLContext
    ) -> asyncio.Protocol:
        """Return the protocol of an accepted connection that is to speak TLS.

        Args:
            make: makes the connection's protocol after the handshake.
        """
        return Handshake(self, make, context, self.config.header_timeout)

    async def watch(self) -> None:
        """Fit the limit to the free descriptors, then keep time until cancelled."""
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        self.most = min(self.most, max(MIN_CONNECTIONS, _available_descriptors(self.most)))
        if self.most < self.config.max_connections:
            _log.warning("the limit of open files leaves room for %d connections", self.most)
        while True:
            await asyncio.sleep(self._tick)
            self.clock += self._tick
            for connection in tuple(self._open):
                connection.check(self._tick)

    def admit(self, connection: OpenConnection) -> None:
        """Add a new connection.

        At the limit the longest idle connection is closed for it. If all are being answered, the
        new one is aborted.
        """
        if len(self._open) < self.most or self._close_longest_idle():
            self._open[connection] = None
        else:
            connection.transport.abort()

    def active(self, connection: OpenConnection) -> None:
        """Mark a connection as the most recently active one."""
        if connection in self._open:
            self._open.move_to_end(connection)

    def forget(self, connection: OpenConnection) -> None:
        """Remove a lost connection."""
        self._open.pop(connection, None)

    def _close_longest_idle(self) -> bool:
        oldest = next((each for each in self._open if not each.is_working), None)
        if oldest is None:
            return False
        self.forget(oldest)
        oldest.transport.abort()
        return True

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle the loop's errors, among them each failed `accept`."""
        error = context.get("exception")
        if "accept()" not in context.get("message", "") or not isinstance(error, OSError):
            loop.default_exception_handler(context)
            return
        if self._relieved != self.clock:
            self._relieved = self.clock
            self.most = max(MIN_CONNECTIONS, len(self._open) * 7 // 8)
            while len(self._open) > self.most and self._close_longest_idle():
                pass
        if time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            _log.error("no connection can be accepted (%s); idle ones are closed", error.strerror)


def _available_descriptors(wanted: int) -> int:
    """Return how many connections the process may open, after raising its soft limit if needed."""
    in_use = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 64
    needed = in_use + SPARE_DESCRIPTORS + wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if soft == resource.RLIM_INFINITY else soft - in_use - SPARE_DESCRIPTORS


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
