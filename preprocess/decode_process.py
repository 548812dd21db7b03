"""A decoding process as its owner sees it, and the fork server that starts it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vlm_serve.errors import MediaError, VlmServeError
from vlm_serve.preprocess.decode_wire import GoneError, map_array, receive, send
from vlm_serve.system import child, children

_START_SECONDS = 120.0
_FORK_SECONDS = 5.0
"""A fork of a fork server that has already answered takes milliseconds. After this time the fork
server is stopped, or hangs."""
_END_SECONDS = 5.0
# Math libraries get one thread: FFmpeg's own suffice, and each further one takes address space.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    # Allocations of picture size are mapped, so freeing them returns the memory to the system.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
}


class ForkServer:
    """The process from which all decoding processes are forked.

    It has already imported everything they need. A fork is ready within milliseconds and shares
    most of its memory with the fork server.

    It is started on first use, and again if it has died or does not answer. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._answered = False

    def fork(self, niceness: int) -> Fork:
        """Start a process. Raises VlmServeError if the fork server cannot be started."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                assert self._sock is not None
                send(self._sock, {"niceness": niceness}, theirs.fileno())
                return Fork(ours, self._process, self._answered)
        except (OSError, GoneError):
            ours.close()
            raise VlmServeError("the media decoder did not start") from None

    def answered(self, fork: Fork) -> None:
        """Note that a process has started, so that later ones are expected soon."""
        with self._lock:
            self._answered = self._answered or fork.server is self._process

    def replace(self, fork: Fork) -> None:
        """End the fork server that this process did not come from; the next fork starts another."""
        with self._lock:
            if fork.server is self._process:
                self._end()

    def close(self) -> None:
        """End the fork server; processes forked from it end with their owner."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        self._end()
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = children.start(
                "vlm_serve.preprocess.decode_worker",
                str(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=child.environment(**_ENVIRONMENT),
            )

    def _end(self) -> None:
        if self._sock is not None:
            self._sock.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._sock = self._process = None
        self._answered = False


@dataclass(frozen=True)
class Fork:
    """A requested process.

    Attributes:
        sock: the owner's end of the connection to it.
        server: the fork server that was asked.
        proven: that fork server has forked before, so it has imported all it needs.
    """

    sock: socket.socket
    server: subprocess.Popen[bytes] | None
    proven: bool


class DecodeProcess:
    """A decoding process that handles one task at a time. It starts in the background.

    Attributes:
        awaiting: a reply is outstanding, so the process cannot take another task.
        pid: its process id once it is ready, 0 before.

    Raises VlmServeError if it does not start.
    """

    def __init__(self, fork_server: ForkServer, niceness: int) -> None:
        self.awaiting = False
        self.pid = 0
        self._lock = threading.Lock()
        self._lifeline = -1
        self._fork_server = fork_server
        self._fork = fork_server.fork(niceness)
        self._sock = self._fork.sock
        seconds = _FORK_SECONDS if self._fork.proven else _START_SECONDS
        self._deadline = time.monotonic() + seconds

    def wait_until_ready(self) -> bool:
        """Wait until the process accepts tasks.

        Returns False if it does not start although others did: its fork server is stopped, hangs
        or has died, and is replaced.

        Raises VlmServeError if it does not start.
        """
        try:
            message, lifeline = receive(self._sock, self._deadline)
        except (GoneError, TimeoutError):
            self._fork_server.replace(self._fork)
            if self._fork.proven:
                return False
            raise VlmServeError("the media decoder did not start") from None
        self._fork_server.answered(self._fork)
        with self._lock:
            self._lifeline, self.pid = lifeline, int(message["pid"])
        return True

    @property
    def alive(self) -> bool:
        return not self._ended(0)

    def kill(self) -> None:
        """End the process, from any thread; a thread waiting for it gets GoneError."""
        with self._lock:
            if self._lifeline >= 0:
                os.close(self._lifeline)  # which ends the worker, see `decode_worker`
            elif not self.pid:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            self._lifeline = -1

    def close(self) -> None:
        """End the process and free its resources."""
        self.kill()
        self._ended(_END_SECONDS)
        self._sock.close()

    def _ended(self, seconds: float) -> bool:
        """Return True if the process has ended or ends within this time.

        Its socket hangs up when it ends.
        """
        if self._sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._sock, 0)
        return any(event & select.POLLHUP for _, event in poll.poll(1000 * seconds))

    def send(self, message: dict[str, Any]) -> None:
        """Send a message without a reply. Raises GoneError."""
        send(self._sock, message)

    def ask(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        """Send a request; `receive` returns its reply. Raises GoneError."""
        self.awaiting = True
        send(self._sock, message, descriptor)

    def receive(self, deadline: float) -> tuple[dict[str, Any], int]:
        """Return a reply and its descriptor, -1 if it carries none.

        Raises MediaError if decoding failed; GoneError; TimeoutError.
        """
        message, descriptor = receive(self._sock, deadline)
        self.awaiting = False
        if "error" in message:
            raise MediaError(str(message["error"]))
        return message, descriptor


def take_pixels(message: dict[str, Any], descriptor: int) -> npt.NDArray[np.uint8]:
    """Map the uint8 `[height, width, 3]` of a reply. Raises as `map_array` does."""
    return take_array(descriptor, tuple(map(int, message["shape"])), np.uint8)


def take_array(descriptor: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Map the array behind a descriptor and close the descriptor. Raises as `map_array` does."""
    try:
        return map_array(descriptor, shape, dtype)
    finally:
        os.close(descriptor)
