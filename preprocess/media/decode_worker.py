"""Decodes media in separate processes. Imports Pillow and PyAV but not torch.

A decode that takes too long or too much memory, or crashes a decoder, can be ended without harm.

    python -m vlm_serve.preprocess.media.decode_worker SOCKET

SOCKET is the number of an inherited socket (`decode_wire`). This process is the fork server. It
receives the sockets of workers over SOCKET and forks a worker for each; no other thread runs here.
It also knows how each has ended, by itself or killed, because it is the parent.
A worker sends its owner one end of a pipe and never reads the other end. As soon as the owner
closes its end, the kernel kills the worker, whatever it is computing and even if it is stopped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import PIL.Image

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.media.decode_wire import GoneError, SharedArray, receive, send, take_array
from vlm_serve.preprocess.media.images import (
    AnimatedPicture,
    MediaMemoryError,
    Pixels,
    count_pages,
    decode_opened,
    may_be_animated,
    open_image,
)
from vlm_serve.preprocess.media.limits import LostFramesError, MediaLimits
from vlm_serve.preprocess.media.videos import EncodedVideo

_KEPT_STATUSES = 64
_STATUS_SECONDS = 1.0
"""A worker whose socket is closed has nothing left to do but to end."""


def main() -> None:
    """Fork a worker for every received socket, or tell there how one ended; until the owner is
    gone."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):  # a terminal's; the owner handles
        signal.signal(number, signal.SIG_IGN)
    ended: dict[int, int] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _note_ended(ended))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    PIL.Image.init()
    gc.collect()
    gc.freeze()  # a collection would write to pages shared by all workers and copy them
    sock = socket.socket(fileno=int(sys.argv[1]))
    while True:
        try:
            request, descriptor = receive(sock)
        except GoneError:
            return
        with socket.socket(fileno=descriptor) as theirs, contextlib.suppress(OSError, GoneError):
            if "pid" in request:
                send(theirs, {"status": _status(ended, request["pid"])})
            elif os.fork() == 0:
                sock.close()
                _work(theirs, request["niceness"])


def _note_ended(ended: dict[int, int]) -> None:
    """Take the statuses of ended workers, which leave no zombies; keep the latest ones."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    while len(ended) > _KEPT_STATUSES:
        del ended[next(iter(ended))]


def _status(ended: dict[int, int], pid: int) -> int | None:
    """Return the status of a worker that is about to end; None: it is not known."""
    deadline = time.monotonic() + _STATUS_SECONDS
    while pid not in ended and time.monotonic() < deadline:
        time.sleep(0.001)
    return ended.pop(pid, None)


def _work(sock: socket.socket, niceness: int) -> NoReturn:
    """Serve one task after another until the owner closes the connection."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _end_with_owner(sock)
        os.nice(niceness)
        own_bytes = _address_space()
        while True:
            task, descriptor = receive(sock)
            if "kind" in task:  # otherwise it belongs to a video that has failed meanwhile
                _serve(sock, task, descriptor, own_bytes)
    except GoneError:
        pass
    finally:
        os._exit(0)


def _end_with_owner(sock: socket.socket) -> None:
    ours, theirs = os.pipe()
    fcntl.fcntl(ours, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(ours, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(ours, fcntl.F_SETFL, fcntl.fcntl(ours, fcntl.F_GETFL) | os.O_ASYNC)
    try:
        send(sock, {"pid": os.getpid()}, theirs)
    finally:
        os.close(theirs)


def _address_space() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:  # not Linux: time is limited but memory is not
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
    # The file is mapped once; an image is also copied for Pillow.
    _limit_memory(own_bytes, task["max_bytes"] + 2 * size)
    try:
        data = take_array(descriptor, (size,), np.uint8)
        if task["kind"] == "image":
            _serve_image(sock, data.tobytes(), limits, task["max_work"])
        elif task["kind"] == "document":
            send(sock, {"pages": count_pages(data.tobytes())})
        else:
            _serve_video(sock, data, limits, task)
    except MediaError as error:
        send(sock, {"error": error.message, "lost": isinstance(error, LostFramesError)})
    except MemoryError:
        most_mib = limits.max_decode_bytes >> 20
        send(sock, {"error": f"the {task['kind']} takes over {most_mib} MiB to decode"})


def _serve_image(
    sock: socket.socket, data: bytes, limits: MediaLimits, max_work: int | None
) -> None:
    opened = open_image(data, limits)
    if max_work is not None and opened.work > max_work:
        send(sock, {"heavy": True})
        return
    arrays: list[SharedArray] = []

    def new(shape: tuple[int, int, int]) -> Pixels:
        arrays.append(_shared(shape))
        return arrays[0].array

    try:
        pixels = decode_opened(opened, limits, new=new)
        send(sock, {"shape": pixels.shape}, arrays[0].descriptor)
    except MediaMemoryError:
        if max_work is None:
            raise
        send(sock, {"heavy": True})
    finally:
        for shared in arrays:
            shared.__exit__()


def _shared(shape: tuple[int, ...], dtype: Any = np.uint8) -> SharedArray:
    try:
        return SharedArray(shape, dtype)
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.ENOSPC):
            raise MemoryError from None
        raise


def _serve_video(sock: socket.socket, data: Any, limits: MediaLimits, task: dict[str, Any]) -> None:
    """Send the times of all frames, then one selected frame per "next" message.

    The owner asks for a few frames ahead.
    """
    survey = {} if may_be_animated(data.data) else {"survey": task["survey"]}
    video = (EncodedVideo if survey else AnimatedPicture)(data.data, task["fps"], limits, **survey)
    with _shared((len(video.times),), np.float64) as times:
        times.array[:] = video.times
        head = {"fps": video.fps, "steady": video.steady, "cut_short": video.cut_short}
        send(sock, head | {"count": len(video.times)}, times.descriptor)
    request, _ = receive(sock)
    if "indices" not in request:
        return
    for pixels in video.frames(request["indices"]):
        with _shared(pixels.shape) as shared:
            shared.array[:] = pixels
            if "next" not in receive(sock)[0]:
                return
            done = {"sound": video.sound, "decoded": video.num_decoded}
            send(sock, {"shape": pixels.shape} | done, shared.descriptor)


if __name__ == "__main__":
    main()
