"""The connections of a server: their limit, and deadlines for their clients.

uvicorn on its own never closes a connection in the middle of a request, however silent. It also
waits for ever for a client to read its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.streaming import BODY

_log = logging.getLogger(__name__)

TICKS_PER_DEADLINE = 8
MAX_TICK_SECONDS = 1.0
SPARE_DESCRIPTORS = 128
"""Descriptors reserved for media, tiers, decoders and files."""
MIN_CONNECTIONS = 8
LOG_SECONDS = 60.0
UNSENT_BYTES = 64 << 10
"""Bytes that the kernel keeps for a client that does not read, beyond those on their way."""
READ_BYTES = 64 << 10
"""Bytes read at once at most. A request sends no more before its route asks for the body."""

_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_CLOSE = [(b"connection", b"close")]


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
        self._open: OrderedDict[Connection | Handshake, None] = (
            OrderedDict()
        )  # least recently active first
        shortest = min(config.header_timeout, config.send_timeout)
        self._tick = min(MAX_TICK_SECONDS, shortest / TICKS_PER_DEADLINE)
        self._relieved = -1.0
        self._logged = -LOG_SECONDS

    def __len__(self) -> int:
        return len(self._open)

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

    def admit(self, connection: Connection | Handshake) -> None:
        """Add a new connection.

        At the limit the longest idle connection is closed for it. If all are being answered, the
        new one is aborted.
        """
        if len(self._open) < self.most or self._close_longest_idle():
            self._open[connection] = None
        else:
            connection.transport.abort()

    def active(self, connection: Connection | Handshake) -> None:
        """Mark a connection as the most recently active one."""
        if connection in self._open:
            self._open.move_to_end(connection)

    def forget(self, connection: Connection | Handshake) -> None:
        """Remove a lost connection."""
        self._open.pop(connection, None)

    def _close_longest_idle(self) -> bool:
        oldest = next((connection for connection in self._open if not connection.is_working), None)
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


def _bound_unsent(transport: asyncio.Transport) -> None:
    """Have the kernel take little more than the client's window: its buffers would else hold whole
    answers that nobody reads, and nothing could tell."""
    sock = transport.get_extra_info("socket")
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None and sock is not None and sock.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)


class Handshake(asyncio.Protocol):
    """A connection from its acceptance to the end of its handshake; it counts as an idle one.

    asyncio's own TLS servers tell nobody of a connection before.

    Args:
        connections: the server's connections.
        make: makes the connection that follows.
        context: settings of TLS.
    """

    is_working = False
    transport: asyncio.Transport

    def __init__(
        self,
        connections: Connections,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
    ) -> None:
        self._all = connections
        self._make = make
        self._context = context
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
                ssl_handshake_timeout=self._all.config.header_timeout,
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


class _Closing:
    """A transport for uvicorn's response cycle; closing it first reads the rest of a refused
    body."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.close_when_read()


class ChunkedBody:
    """Stands between a response cycle and h11, which would walk through its states for each chunk
    of a body, though none changes them. All but such chunks is h11's.
    """

    def __init__(self, connection: Connection) -> None:
        self._conn, self._flow = connection.conn, connection.flow
        self._transport = connection.transport
        self._chunked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conn, name)

    def send(self, event: h11.Event) -> bytes | None:
        """Return the bytes of a part of the response."""
        if self._chunked and type(event) is h11.Data:
            return _chunk(event.data)
        output = self._conn.send(event)
        if isinstance(event, h11.Response):
            self._chunked = b"\r\ntransfer-encoding: chunked\r\n" in (output or b"").lower()
        elif isinstance(event, h11.EndOfMessage):
            self._chunked = False
        return output

    def ready(self) -> bool:
        """See `Writing.ready`."""
        return self._chunked and not (self._flow.write_paused or self._transport.is_closing())

    def write(self, data: bytes) -> None:
        """Write a chunk."""
        self._transport.write(_chunk(data))


def _chunk(data: bytes) -> bytes:
    """Return a chunk (RFC 9112, 7.1); one without data would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


class Connection(H11Protocol):
    """One connection. `check` is called at every tick and closes it if its client is too slow."""

    transport: asyncio.Transport

    def __init__(self, open_connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._all = open_connections
        self._head_since: float | None = None
        self._measured: RequestResponseCycle | None = None
        self._body_bytes = 0
        self._body_seconds = 0.0
        self._unsent_since: float | None = None
        self._unsent = 0
        self._discarding = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        _bound_unsent(transport)
        # What a slow client has not taken waits as tokens, which share an event, not as bytes.
        transport.set_write_buffer_limits(high=1)
        # uvicorn starts its timer only between two requests.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        self._all.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.forget(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self.cycle is not None:
            self.cycle.body = bytearray()  # free what no route will read

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        self._all.active(self)
        self._body_bytes += len(data)
        super().data_received(data)
        if self.cycle is not self._measured:  # another request has begun
            self._measured = self.cycle
            self.cycle.transport = cast(asyncio.Transport, _Closing(self))
            self._body_bytes, self._body_seconds = 0, 0.0
            if self.conn.their_state is h11.SEND_BODY and not self.cycle.response_complete:
                self.flow.pause_reading()  # until the route asks for the body
        if self.conn.their_state is not h11.IDLE:
            self._head_since = None
        elif self._head_since is None:
            self._head_since = self._all.clock

    def handle_events(self) -> None:
        """Parse what has come. Behind a request with two lengths the connection ends (RFC 9112,
        6.1): what a proxy takes for the rest of its body must not be read as another request."""
        super().handle_events()
        if self.cycle is None:
            return
        if not isinstance(self.cycle.conn, ChunkedBody):
            body = ChunkedBody(self)
            self.cycle.conn = cast(h11.Connection, body)
            if self.cycle.scope["method"] != "HEAD":
                cast(dict[str, Any], self.cycle.scope)[BODY] = body
        if {b"content-length", b"transfer-encoding"} <= {
            name for name, _ in self.cycle.scope["headers"]
        }:
            self.cycle.keep_alive = False
            self.cycle.default_headers = [*self.server_state.default_headers, *_CLOSE]

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid bytes, also while a request is being answered.

        uvicorn does not look for such a request. The bytes after it cannot be parsed, so the
        connection ends, and the answer with it.
        """
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        super().send_400_response(msg)

    def on_response_complete(self) -> None:
        self._all.active(self)
        super().on_response_complete()

    def resume_writing(self) -> None:
        self._unsent_since = None
        super().resume_writing()

    def close_when_read(self) -> None:
        """Close the connection after the body has been read to its end.

        Closing it earlier would reset the connection before the client has read the answer.
        """
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._discarding = True
            if self.transport.can_write_eof():  # TLS cannot
                self.transport.write_eof()
            self.flow.resume_reading()
        else:
            self.transport.close()

    @property
    def is_working(self) -> bool:
        """True if its request is complete and is being answered."""
        answering = self.cycle is not None and not self.cycle.response_complete
        return answering and self.conn.their_state is not h11.SEND_BODY

    def check(self, seconds: float) -> None:
        """Close the connection if its client is too slow.

        Args:
            seconds: time since the last check.
        """
        if self._reads_too_slowly():
            self.transport.abort()
        elif not self.transport.is_closing() and self._sends_too_slowly(seconds):
            if self._head_since is not None or not self.cycle.response_started:
                self.transport.write(_TIMEOUT)
            self.transport.close()

    def _sends_too_slowly(self, seconds: float) -> bool:
        config, now = self._all.config, self._all.clock
        if self._head_since is not None:
            return now - self._head_since > config.header_timeout
        if self.conn.their_state is not h11.SEND_BODY or self._is_held_up:
            return False
        self._body_seconds += seconds
        earned = self._body_bytes / config.min_body_rate_bytes
        if self.cycle.response_complete:
            earned = 0.0  # the rest of a body that was refused
        return self._body_seconds > config.header_timeout + earned

    @property
    def _is_held_up(self) -> bool:
        """True if the server itself delays the body."""
        return self.flow.read_paused or self.cycle.waiting_for_100_continue

    def _reads_too_slowly(self) -> bool:
        """Return True if the client has taken too little of the unsent bytes for too long."""
        unsent, now = self.transport.get_write_buffer_size(), self._all.clock
        if not unsent:
            self._unsent_since = None
            return False
        if self._unsent_since is None or unsent <= self._unsent - HIGH_WATER_LIMIT:
            self._unsent_since, self._unsent = now, unsent
        self._unsent = max(self._unsent, unsent)
        return now - self._unsent_since > self._all.config.send_timeout
