"""The protocol between a decoding process and its owner.

Small JSON messages travel over a socket. Pixels lie in shared memory; a message carries its
descriptor.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import socket
import struct
import time
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_MESSAGE_BYTES = 16 << 20
_LENGTH = struct.Struct("<I")


class GoneError(Exception):
    """The other side has ended or closed the connection."""


def send(sock: socket.socket, message: dict[str, Any], descriptor: int | None = None) -> None:
    """Send a message, with a descriptor if there is one. Raises GoneError."""
    body = json.dumps(message).encode()
    try:
        if descriptor is None:
            sock.sendall(_LENGTH.pack(len(body)) + body)
        else:
            socket.send_fds(sock, [_LENGTH.pack(len(body))], [descriptor])
            sock.sendall(body)
    except OSError as error:
        raise GoneError from error


def receive(sock: socket.socket, deadline: float | None = None) -> tuple[dict[str, Any], int]:
    """Receive a message and its descriptor, -1 if it carries none; the caller closes it.

    Args:
        deadline: a time of `time.monotonic`.

    Raises GoneError, also for a malformed message; TimeoutError at the deadline.
    """
    descriptors: list[int] = []
    try:
        length = _LENGTH.unpack(_read(sock, _LENGTH.size, deadline, descriptors))[0]
        if length > MAX_MESSAGE_BYTES:
            raise GoneError
        message = json.loads(_read(sock, length, deadline, descriptors))
        if not isinstance(message, dict):
            raise GoneError
        return message, descriptors.pop() if descriptors else -1
    except TimeoutError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise GoneError from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _read(sock: socket.socket, size: int, deadline: float | None, descriptors: list[int]) -> bytes:
    """Return so many bytes; add descriptors that come with them."""
    data = bytearray()
    while len(data) < size:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        piece, passed, _, _ = socket.recv_fds(sock, size - len(data), 1)
        descriptors += passed
        if not piece:
            raise GoneError
        data += piece
    return bytes(data)


class SharedArray:
    """An array in memory that another process can map.

    Leaving the `with` closes the descriptor. The memory lives as long as arrays on it.

    Attributes:
        array: an array of the requested shape and type.
        descriptor: names the memory; send it to the other process.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.descriptor = _new_memory(max(size, 1))
        try:
            self.array: npt.NDArray[Any] = map_array(self.descriptor, shape, dtype)
        except BaseException:
            os.close(self.descriptor)
            raise

    def __enter__(self) -> SharedArray:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.descriptor)


def share(data: bytes) -> SharedArray:
    """Copy bytes into memory that another process can map."""
    shared = SharedArray((len(data),), np.uint8)
    shared.array[:] = np.frombuffer(data, np.uint8)
    return shared


def _new_memory(size: int) -> int:
    descriptor = os.memfd_create("vlm-serve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_array(descriptor: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Map the array behind a received descriptor.

    Raises GoneError if the memory is smaller than the shape requires, MemoryError if it cannot be
    mapped.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    # If the sender shrank the memory later, reading it would kill this process.
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    if os.fstat(descriptor).st_size < size:
        raise GoneError
    try:
        memory = mmap.mmap(descriptor, max(size, 1))
    except OSError:
        raise MemoryError from None
    return np.frombuffer(memory, dtype, count=int(np.prod(shape))).reshape(shape)


def take_array(descriptor: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Map the array behind a descriptor and close the descriptor. Raises as `map_array` does."""
    try:
        return map_array(descriptor, shape, dtype)
    finally:
        os.close(descriptor)
