"""A decoding process seen from its owner: started, asked, ended at a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from vlm_serve import child
from vlm_serve.errors import MediaError, VlmServeError
from vlm_serve.preprocess.decode_wire import GoneError, map_array, receive, send

_START_SECONDS = 120.0
_END_SECONDS = 5.0
# One thread each: FFmpeg's own are enough, and every further one takes address space.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    # Pictures go back to the system when they are done, at any time.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
}


class ForkServer:
    """The process that all decoding processes are forked from: it has imported what they need, so
    that one is there within milliseconds, and most of their memory is its own.

    It is started when it is first needed, and again if it has died. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None

    def fork(self, niceness: int) -> socket.socket:
        """Has a process started; the owner's end of the connection to it.

        Raises VlmServeError if there is none to be had.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                assert self._sock is not None
                send(self._sock, {"niceness": niceness}, theirs.fileno())
        except (OSError, GoneError):
            ours.close()
            raise VlmServeError("the media decoder did not start") from None
        return ours

    def close(self) -> None:
        """Ends it; those that it has forked end with their owner."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        self._end()
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                child.command("vlm_serve.preprocess.decode_worker", str(theirs.fileno())),
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


class DecodeProcess:
    """One process, one task at a time. It starts while its owner goes on.

    Attributes:
        awaiting: it has been asked for something that has not come: not fit for another task.
        pid: its number once it is ready, 0 before.

    Raises VlmServeError if it does not start.
    """

    def __init__(self, fork_server: ForkServer, niceness: int) -> None:
        self.awaiting = False
        self.pid = 0
        self._lock = threading.Lock()
        self._life = -1
        self._sock = fork_server.fork(niceness)
        self._deadline = time.monotonic() + _START_SECONDS

    def wait_until_ready(self) -> None:
        """Returns once it can be asked. Raises VlmServeError if it does not start."""
        if self.pid:
            return
        try:
            message, life = receive(self._sock, self._deadline)
        except (GoneError, TimeoutError):
            raise VlmServeError("the media decoder did not start") from None
        with self._lock:
            self._life, self.pid = life, int(message["pid"])

    @property
    def alive(self) -> bool:
        return not self._ended(0)

    def kill(self) -> None:
        """Ends it, from any thread; who waits for it sees GoneError."""
        with self._lock:
            if self._life >= 0:
                os.close(self._life)  # see `decode_worker`
            elif not self.pid:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            self._life = -1

    def close(self) -> None:
        """Ends it and frees what belongs to it."""
        self.kill()
        self._ended(_END_SECONDS)
        self._sock.close()

    def _ended(self, seconds: float) -> bool:
        """Whether it has ended, or does within that time: then nobody has its end any more."""
        if self._sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._sock, 0)
        return any(event & select.POLLHUP for _, event in poll.poll(1000 * seconds))

    def send(self, message: dict[str, Any]) -> None:
        """Sends what has no answer. Raises GoneError."""
        send(self._sock, message)

    def ask(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        """Sends what `receive` will find the answer to. Raises GoneError."""
        self.awaiting = True
        send(self._sock, message, descriptor)

    def receive(self, deadline: float) -> tuple[dict[str, Any], int]:
        """An answer and the descriptor that came with it, -1 if none did.

        Raises MediaError if that is what the decoding came to; GoneError; TimeoutError.
        """
        message, descriptor = receive(self._sock, deadline)
        self.awaiting = False
        if "error" in message:
            raise MediaError(str(message["error"]))
        return message, descriptor

    def receive_pixels(self, deadline: float) -> npt.NDArray[np.uint8] | None:
        """uint8 `[height, width, 3]`; None of an image that is more work than the task allowed.

        Raises as `receive` does.
        """
        message, descriptor = self.receive(deadline)
        if descriptor < 0:
            return None
        return take_array(descriptor, tuple(map(int, message["shape"])), np.uint8)


def take_array(descriptor: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The array behind a descriptor, which is closed. Raises as `map_array` does."""
    try:
        return map_array(descriptor, shape, dtype)
    finally:
        os.close(descriptor)
