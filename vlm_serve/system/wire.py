"""Messages between a process and its child, over a private socket pair.

A message is pickled. Large buffers of arrays are not copied into it: they are in a file in memory
without a name, whose descriptor goes with the message. Such a file is gone when nobody has it
open, so nothing is left behind whoever dies.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import mmap
import os
import pickle
import select
import socket
import struct
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

SHARED_BYTES = 64 << 10
"""Least size of a buffer that travels as shared memory."""
_HEAD = struct.Struct("<QI")
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

Reducers = Mapping[type[Any], Callable[[Any], tuple[Any, ...]]]
"""How objects of other types than pickle's are reduced, as `copyreg.dispatch_table` has it."""


class ConnectionLostError(Exception):
    """The other side has closed the connection or has not replied in time."""


class ReplyTimeoutError(ConnectionLostError):
    """The other side has not replied in time."""


class Wire:
    """One end of a connection. One thread may send while another one receives.

    Every method raises ConnectionLostError.

    Args:
        descriptor: a connected Unix socket; this object takes ownership.
        reducers: reduce what pickle cannot, or not well.
    """

    def __init__(self, descriptor: int, reducers: Reducers | None = None) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._table: Any = ChainMap({**(reducers or {})}, copyreg.dispatch_table)

    def send(self, *message: Any) -> None:
        """Send a name with its arguments, a reply, or several of them."""
        stream, large = io.BytesIO(), list[memoryview]()

        def stays(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < SHARED_BYTES or not _can_share():
                return True
            large.append(raw)
            return False

        pickler = pickle.Pickler(stream, protocol=5, buffer_callback=stays)
        pickler.dispatch_table = self._table
        pickler.dump(message)
        head = _HEAD.pack(stream.tell(), len(large))
        try:
            if not large:
                self._socket.sendall(head + stream.getbuffer())
                return
            with _shared(large) as descriptor:
                socket.send_fds(self._socket, [head], [descriptor])
            sizes = struct.pack(f"<{len(large)}Q", *(each.nbytes for each in large))
            self._socket.sendall(sizes + stream.getbuffer())
        except OSError as error:
            raise ConnectionLostError from error

    def receive(self, seconds: float | None = None) -> tuple[Any, ...]:
        """Wait for the next message; without `seconds`, wait for ever."""
        try:
            if seconds is not None and not self._readable(seconds):
                raise ReplyTimeoutError
            # The descriptor comes with the first byte.
            head, descriptors, _, _ = socket.recv_fds(self._socket, _HEAD.size, 1, _CLOSE_ON_EXEC)
            buffers = memoryview(b"")
            for descriptor in descriptors:
                try:
                    buffers = memoryview(mmap.mmap(descriptor, 0))
                finally:
                    os.close(descriptor)
            if not head:
                raise ConnectionLostError
            size, count = _HEAD.unpack(head + self._read(_HEAD.size - len(head)))
            sizes = struct.unpack(f"<{count}Q", self._read(8 * count))
            parts = list[memoryview]()
            for each in sizes:
                parts.append(buffers[:each])
                buffers = buffers[_aligned(each) :]
            message: tuple[Any, ...] = pickle.loads(self._read(size), buffers=parts)
        except OSError as error:
            raise ConnectionLostError from error
        return message

    def close(self) -> None:
        """Close the connection; the other side, and a thread that waits here, learn of it."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _readable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            count = self._socket.recv_into(left)
            if not count:
                raise ConnectionLostError
            left = left[count:]
        return data


def _aligned(size: int) -> int:
    """Return the size with the gap behind it, so that all buffers begin at a multiple of 64."""
    return -(-size // 64) * 64


@cache
def _can_share() -> bool:
    """Tell whether the system has files in memory, and lets this process have some."""
    try:
        os.close(os.memfd_create("vlm-serve", os.MFD_CLOEXEC))
    except (AttributeError, OSError):
        return False
    return True


@contextlib.contextmanager
def _shared(buffers: Sequence[memoryview]) -> Iterator[int]:
    """Yield the descriptor of a file in memory with the buffers, one behind the other."""
    descriptor = os.memfd_create("vlm-serve", os.MFD_CLOEXEC)
    try:
        at = 0
        os.ftruncate(descriptor, sum(_aligned(buffer.nbytes) for buffer in buffers))
        for buffer in buffers:
            left, end = buffer, at + _aligned(buffer.nbytes)
            while left:
                count = os.pwrite(descriptor, left, at)
                left, at = left[count:], at + count
            at = end
        yield descriptor
    finally:
        os.close(descriptor)
