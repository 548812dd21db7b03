"""Processes that decode media: light ones for small pictures, heavy ones for all else.

A decode ends at its deadline, when it takes too much memory, or when its client leaves: then its
process ends, and another one is forked when it is needed. Heavy ones run at a low priority, few at
a time and one task each, so that neither their work nor what they held is in anybody's way. Light
ones are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vlm_serve.errors import EngineClosedError, MediaError, VlmServeError
from vlm_serve.preprocess.decode_places import Places
from vlm_serve.preprocess.decode_process import DecodeProcess, ForkServer, take_array
from vlm_serve.preprocess.decode_wire import GoneError, share
from vlm_serve.preprocess.limits import MediaLimits
from vlm_serve.preprocess.media_image import Pixels
from vlm_serve.preprocess.stopping import Stop

LIGHT_FILE_BYTES = 2 << 20
LIGHT_WORK = 1 << 22
"""Pixels, counted once per pass over them, up to which an image is light; more is known from its
header."""
LIGHT_DECODE_BYTES = 256 << 20
"""Memory for a light image, several times what one takes; one that needs more is heavy."""
PROCESS_BYTES = 64 << 20
"""What a process has before it decodes anything: Python, NumPy, Pillow and FFmpeg. Most of it is
shared by all."""
HEAVY_NICENESS = 10
# A video's process knows its deadline itself and says so; this much later it is ended.
_GRACE_SECONDS = 10.0


def default_places() -> tuple[int, int]:
    """Most light and most heavy processes where nobody says."""
    processors = os.cpu_count() or 1
    return min(max(2, processors), 4), min(max(2, processors), 3)


class Decoders:
    """Decodes encoded images and videos in processes, which are started when they are needed.

    Args:
        light, heavy: most processes of either kind; None: as in `default_places`.

    Thread-safe. One that is not closed ends its processes when it is collected.
    """

    def __init__(self, light: int | None = None, heavy: int | None = None) -> None:
        places = default_places()
        self.light, self.heavy = Places(light or places[0]), Places(heavy or places[1])
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[DecodeProcess] = []
        self._all: set[DecodeProcess] = set()
        self._fork_server = ForkServer()
        self._end = weakref.finalize(self, _close_all, self._all, self._fork_server)

    def close(self) -> None:
        """Ends all processes; what is being decoded fails."""
        with self._lock:
            self._closed = True
            running = self._all.difference(self._idle)
        for process in running:
            process.kill()
        self.light.close()
        self.heavy.close()
        self._end()

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        with self._lock:
            return [process.pid for process in self._all if process.pid and process.alive]

    @contextlib.contextmanager
    def image(
        self, data: bytes, limits: MediaLimits, param: str | None, stop: Stop
    ) -> Iterator[Pixels]:
        """Pixels of an encoded image, as `media_image.decode_image` gives them. What is done with
        them inside the block counts as part of the decoding: no other picture takes its place.

        Raises MediaError, StoppedError; VlmServeError if no process can be started.
        """
        if len(data) > limits.max_image_bytes:
            raise MediaError(f"the image is over {limits.max_image_bytes} bytes", param=param)
        for heavy in (False, True) if len(data) <= LIGHT_FILE_BYTES else (True,):
            with self._process(heavy, len(data), param, stop) as process:
                with stop.timed("decode"):
                    pixels = _decoded(process, data, limits, heavy)
                if pixels is not None:
                    yield pixels
                    return

    @contextlib.contextmanager
    def video(
        self,
        data: bytes,
        fps: float | None,
        limits: MediaLimits,
        param: str | None,
        stop: Stop,
    ) -> Iterator[DecodedVideo]:
        """An encoded video, as `media_video.EncodedVideo` reads it; good inside the block.

        Raises as `image` does.
        """
        if len(data) > limits.max_video_bytes:
            raise MediaError(f"the video is over {limits.max_video_bytes} bytes", param=param)
        with self._process(True, len(data), param, stop) as process:
            with share(data) as shared:
                process.ask(_task("video", data, limits) | {"fps": fps}, shared.descriptor)
            video = DecodedVideo(process, limits)
            try:
                yield video
            finally:
                video.end()

    @contextlib.contextmanager
    def _process(
        self, heavy: bool, num_bytes: int, param: str | None, stop: Stop
    ) -> Iterator[DecodeProcess]:
        """A process for one task. Whatever way a task ends, the next one finds a sound one."""
        with (self.heavy if heavy else self.light).taken(num_bytes, stop):
            with stop.timed("place"):
                process = self._start(heavy)
            sound = False
            try:
                try:
                    with stop.calling(process.kill):
                        yield process
                finally:
                    sound = not (heavy or process.awaiting or stop.is_set or self._closed)
            except MediaError as error:
                error.param = error.param or param
                raise
            except GoneError:
                sound = False
                stop.check()
                if self._closed:
                    raise EngineClosedError("the engine is closed") from None
                raise MediaError(
                    "the medium is damaged or takes too much memory to decode", param=param
                ) from None
            finally:
                self._put_back(process) if sound else self._drop(process)

    def _start(self, heavy: bool) -> DecodeProcess:
        while not heavy:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                break
            if process.alive:
                return process
            self._drop(process)
        process = DecodeProcess(self._fork_server, HEAVY_NICENESS if heavy else 0)
        with self._lock:
            self._all.add(process)
        try:
            process.wait_until_ready()
        except VlmServeError:
            self._drop(process)
            raise
        return process

    def _put_back(self, process: DecodeProcess) -> None:
        with self._lock:
            self._idle.append(process)

    def _drop(self, process: DecodeProcess) -> None:
        with self._lock:
            self._all.discard(process)
        process.close()


class DecodedVideo:
    """A `Video` whose frames another process decodes, one ahead of the one that is looked at."""

    def __init__(self, process: DecodeProcess, limits: MediaLimits) -> None:
        self._process, self._limits = process, limits
        message, descriptor = self._receive(self._deadline())
        self.fps = float(message["fps"])
        times = take_array(descriptor, (int(message["count"]),), np.float64)
        self.times: Sequence[float] = times.tolist()
        self._open = True

    def frames(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """See `Video.frames`; may be asked for once. Raises MediaError."""
        assert self._open
        self._process.send({"indices": list(indices)})
        deadline = self._deadline()
        for _ in indices:
            self._process.ask({"next": True})
            try:
                pixels = self._process.receive_pixels(deadline)
            except TimeoutError:
                raise _too_slow("video", self._limits.max_decode_seconds) from None
            assert pixels is not None
            yield pixels
        self._open = False

    def end(self) -> None:
        """Frees the process for the next task."""
        if self._open and not self._process.awaiting:
            self._process.send({"stop": True})

    def _deadline(self) -> float:
        return time.monotonic() + self._limits.max_decode_seconds + _GRACE_SECONDS

    def _receive(self, deadline: float) -> tuple[dict[str, Any], int]:
        try:
            return self._process.receive(deadline)
        except TimeoutError:
            raise _too_slow("video", self._limits.max_decode_seconds) from None


def _decoded(
    process: DecodeProcess, data: bytes, limits: MediaLimits, heavy: bool
) -> Pixels | None:
    """None if it is more work, or takes more memory, than a light process is there for."""
    task = _task("image", data, limits) | {"max_work": None}
    if not heavy:
        task |= {"max_work": LIGHT_WORK, "max_bytes": LIGHT_DECODE_BYTES}
    with share(data) as shared:
        process.ask(task, shared.descriptor)
    try:
        return process.receive_pixels(time.monotonic() + limits.max_image_decode_seconds)
    except TimeoutError:
        raise _too_slow("image", limits.max_image_decode_seconds) from None


def _task(kind: str, data: bytes, limits: MediaLimits) -> dict[str, Any]:
    numbers = {
        field.name: value
        for field in dataclasses.fields(limits)
        if isinstance(value := getattr(limits, field.name), int | float)
    }
    most = limits.max_decode_bytes
    return {"kind": kind, "size": len(data), "limits": numbers, "max_bytes": most}


def _too_slow(kind: str, seconds: float) -> MediaError:
    return MediaError(f"decoding the {kind} takes longer than {seconds:g} seconds")


def _close_all(processes: set[DecodeProcess], fork_server: ForkServer) -> None:
    while processes:
        processes.pop().close()
    fork_server.close()
