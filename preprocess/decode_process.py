"""A decoding process seen from its owner: started, asked, ended at a deadline."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import vlm_serve
from vlm_serve.errors import MediaError, VlmServeError
from vlm_serve.preprocess.decode_wire import GoneError, map_array, receive, send

_START_SECONDS = 120.0
# One thread each: FFmpeg's own are enough, and every further one takes address space.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    # Pictures go back to the system when they are done, at any time.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
}


class DecodeProcess:
    """One process, one task at a time. It starts while its owner goes on.

    Attributes:
        awaiting: it has been asked for something that has not come: not fit for another task.

    Raises VlmServeError if it does not start.
    """

    def __init__(self) -> None:
        self.awaiting = False
        self._sock, theirs = socket.socketpair()
        root = str(Path(vlm_serve.__file__).resolve().parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._process = subprocess.Popen(
                # -P: a folder in which the server was started is nothing to import from.
                [
                    *(sys.executable, "-P", "-m", "vlm_serve.preprocess.decode_worker"),
                    str(theirs.fileno()),
                ],
                stdin=subprocess.PIPE,  # the worker ends when this closes
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
            )
        except OSError:
            self._sock.close()
            raise VlmServeError("the media decoder did not start") from None
        finally:
            theirs.close()
        self._deadline = time.monotonic() + _START_SECONDS
        self._ready = False

    def wait_until_ready(self) -> None:
        """Returns once it can be asked. Raises VlmServeError if it does not start."""
        if self._ready:
            return
        try:
            receive(self._sock, self._deadline)
        except (GoneError, TimeoutError):
            raise VlmServeError("the media decoder did not start") from None
        self._ready = True

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends it, from any thread; who waits for it sees GoneError."""
        self._process.kill()

    def close(self) -> None:
        """Ends it and frees what belongs to it."""
        self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._sock.close()
        self._process.wait()

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

    def receive_pixels(self, deadline: float) -> npt.NDArray[np.uint8] | int:
        """uint8 `[height, width, 3]`; or an image's work, which was more than the task allowed.

        Raises as `receive` does.
        """
        message, descriptor = self.receive(deadline)
        if descriptor < 0:
            return int(message["work"])
        return take_array(descriptor, tuple(map(int, message["shape"])), np.uint8)


def take_array(descriptor: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The array behind a descriptor, which is closed. Raises as `map_array` does."""
    try:
        return map_array(descriptor, shape, dtype)
    finally:
        os.close(descriptor)
