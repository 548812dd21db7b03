"""A connection with deadlines for its client.

uvicorn on its own never closes a connection in the middle of a request, however silent. It also
waits for ever for a client to read its answer.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol, cast

import h11
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from vlm_serve.server.config import ServerConfig

READ_BYTES = 64 << 10
"""Bytes read at once at most. A request sends no more before its route asks for the body."""

_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class OpenConnection(Protocol):
    """What a connection is to those that count it."""

    transport: asyncio.Transport

    @property
    def is_working(self) -> bool:
        """True if its request is complete and is being answered."""
        ...

    def check(self, seconds: float) -> None:
        """Close the connection if its client is too slow.

        Args:
            seconds: time since the last check.
        """
        ...


class ConnectionPool(Protocol):
    """The open connections of a server, as one of them sees them.

    Attributes:
        config: the server's options.
        clock: seconds, counted in ticks of the event loop.
    """

    config: ServerConfig
    clock: float

    def admit(self, connection: OpenConnection) -> None:
        """Add a new connection, or abort it."""
        ...

    def active(self, connection: OpenConnection) -> None:
        """Mark a connection as the most recently active one."""
        ...

    def forget(self, connection: OpenConnection) -> None:
        """Remove a lost connection."""
        ...


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


class Connection(H11Protocol):
    """One connection. `check` is called at every tick and closes it if its client is too slow."""

    transport: asyncio.Transport

    def __init__(self, open_connections: ConnectionPool, **arguments: Any) -> None:
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
