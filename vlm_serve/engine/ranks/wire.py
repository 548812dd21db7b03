"""Messages between the engine and its ranks, over a private socket pair."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any


class ConnectionLostError(Exception):
    """The other side has closed the connection or has not replied in time."""


class ReplyTimeoutError(ConnectionLostError):
    """The other side has not replied in time."""


class Wire:
    """One end of a connection. Every method raises ConnectionLostError.

    Args:
        descriptor: a connected socket; this object takes ownership.
    """

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)

    def send(self, *message: Any) -> None:
        """Send a name with its arguments, or a reply. Tensors are copied."""
        try:
            self._connection.send_bytes(pickle.dumps(message, protocol=5))
        except OSError as error:
            raise ConnectionLostError from error

    def receive(self, seconds: float | None = None) -> tuple[Any, ...]:
        """Wait for the next message; without `seconds`, wait for ever."""
        try:
            if seconds is not None and not self._connection.poll(seconds):
                raise ReplyTimeoutError
            message: tuple[Any, ...] = pickle.loads(self._connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise ConnectionLostError from error
        return message

    def close(self) -> None:
        self._connection.close()
