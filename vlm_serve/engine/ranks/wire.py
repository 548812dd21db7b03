"""Messages between the engine and its ranks, over a pair of sockets that nobody else has."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any


class ConnectionLostError(Exception):
    """The other side has closed, or has not answered in time."""


class ReplyTimeoutError(ConnectionLostError):
    """It has not answered in time."""


class Wire:
    """One end.

    Args:
        descriptor: of a connected socket, which is this one's from now on.

    Raises GoneError from every method.
    """

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)

    def send(self, *message: Any) -> None:
        """A name and its arguments, or an answer. Tensors travel by value."""
        try:
            self._connection.send_bytes(pickle.dumps(message, protocol=5))
        except OSError as error:
            raise ConnectionLostError from error

    def receive(self, seconds: float | None = None) -> tuple[Any, ...]:
        """Waits for the next message, for ever if no time is given."""
        try:
            if seconds is not None and not self._connection.poll(seconds):
                raise ReplyTimeoutError
            message: tuple[Any, ...] = pickle.loads(self._connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise ConnectionLostError from error
        return message

    def close(self) -> None:
        self._connection.close()
