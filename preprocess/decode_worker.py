"""Decodes media in a process of its own, so that what takes too long or too much memory, or crashes
a decoder, can be ended without harm. Imports Pillow and PyAV but not torch.

    python -m vlm_serve.preprocess.decode_worker SOCKET

SOCKET is the number of an inherited socket (`decode_wire`). Standard input is never read: it is a
pipe whose other end nobody but the owner holds, so that this process ends with its owner at once,
whatever it is computing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.decode_wire import GoneError, SharedArray, map_array, receive, send
from vlm_serve.preprocess.limits import MediaLimits
from vlm_serve.preprocess.media_image import Pixels, decode_opened, open_image
from vlm_serve.preprocess.media_video import EncodedVideo

NICENESS = 5
"""On few processors a medium that is decoded takes a third of the time that a step gets, since
every open answer waits for the step."""


def main() -> None:
    """Serves until its owner is gone."""
    _end_with_owner()
    os.nice(NICENESS)
    sock = socket.socket(fileno=int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    own_bytes = _address_space()
    with contextlib.suppress(GoneError):
        send(sock, {"ready": True})
        while True:
            task, descriptor = receive(sock)
            if "kind" in task:  # else it is about a video that has failed meanwhile
                _serve(sock, task, descriptor, own_bytes)


def _end_with_owner() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl+C is the owner's to handle
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)


def _address_space() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:  # not Linux: then there is no limit of memory, only of time
        return resource.RLIM_INFINITY
    return pages * resource.getpagesize()


def _limit_memory(own_bytes: int, task_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if own_bytes == resource.RLIM_INFINITY:
        return
    wanted = own_bytes + task_bytes
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))


def _serve(sock: socket.socket, task: dict[str, Any], descriptor: int, own_bytes: int) -> None:
    limits = MediaLimits(**task["limits"])
    size = task["size"]
    # The file is mapped once and, if it is an image, copied for Pillow.
    _limit_memory(own_bytes, limits.max_decode_bytes + 2 * size)
    try:
        with _closing(descriptor):
            data = map_array(descriptor, (size,), np.uint8)
        if task["kind"] == "image":
            _serve_image(sock, data.tobytes(), limits, task["max_work"])
        else:
            _serve_video(sock, data, limits, task["fps"])
    except MediaError as error:
        send(sock, {"error": error.message})
    except MemoryError:
        send(sock, {"error": _too_much_memory(task["kind"], limits)})


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def _too_much_memory(kind: str, limits: MediaLimits) -> str:
    return f"the {kind} takes over {limits.max_decode_bytes >> 20} MiB to decode"


def _serve_image(
    sock: socket.socket, data: bytes, limits: MediaLimits, max_work: int | None
) -> None:
    opened = open_image(data, limits)
    if max_work is not None and opened.work > max_work:
        send(sock, {"work": opened.work})
        return
    made: list[SharedArray] = []

    def new(shape: tuple[int, int, int]) -> Pixels:
        made.append(_shared(shape))
        return made[0].array

    try:
        pixels = decode_opened(opened, limits, new=new)
        send(sock, {"shape": pixels.shape}, made[0].descriptor)
    finally:
        for shared in made:
            shared.__exit__()


def _shared(shape: tuple[int, ...], dtype: Any = np.uint8) -> SharedArray:
    try:
        return SharedArray(shape, dtype)
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.ENOSPC):
            raise MemoryError from None
        raise


def _serve_video(sock: socket.socket, data: Any, limits: MediaLimits, fps: float | None) -> None:
    """Says the times of all frames, then gives one of those asked for per message."""
    video = EncodedVideo(data.data, fps, limits)
    with _shared((len(video.times),), np.float64) as times:
        times.array[:] = video.times
        send(sock, {"fps": video.fps, "count": len(video.times)}, times.descriptor)
    order, _ = receive(sock)
    if "indices" not in order:
        return
    for pixels in video.frames(order["indices"]):
        with _shared(pixels.shape) as shared:
            shared.array[:] = pixels
            if "next" not in receive(sock)[0]:
                return
            send(sock, {"shape": pixels.shape}, shared.descriptor)


if __name__ == "__main__":
    main()
