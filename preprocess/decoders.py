"""A small pool of decoding processes, and the order in which media get one.

A decode ends at its deadline, when it takes too much memory, or when its client leaves: then its
process ends, and another one starts in its place. Media that take much work leave one
process to the others, so that a small picture never waits for large ones.
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
from vlm_serve.preprocess.decode_process import DecodeProcess, take_array
from vlm_serve.preprocess.decode_wire import GoneError, share
from vlm_serve.preprocess.limits import MediaLimits
from vlm_serve.preprocess.media_image import Pixels
from vlm_serve.preprocess.stopping import Stop

# Images of more pixels, counted once per pass over them, are the ones that leave a process free.
_SMALL_WORK = 1 << 22
PROCESS_BYTES = 64 << 20
"""What a process has before it decodes anything: Python, NumPy, Pillow and FFmpeg."""
# Who waits is served in the order of arrival, as if a file of so many bytes came a second later.
_BYTES_PER_SECOND = 1 << 20
# A video's process knows its deadline itself and says so; this much later it is ended.
_GRACE_SECONDS = 10.0


def default_size() -> int:
    """Most processes where nobody says: as many as processors, at least 3 and at most 4."""
    return min(max(3, os.cpu_count() or 1), 4)


@dataclasses.dataclass(eq=False, slots=True)
class _Ticket:
    large: bool
    turn: float


class Decoders:
    """Decodes encoded images and videos in processes, which are started when they are needed.

    Args:
        size: most processes; None: `default_size()`.

    Thread-safe. One that is not closed ends its processes when it is collected.
    """

    def __init__(self, size: int | None = None) -> None:
        self._size = size or default_size()
        self._changed = threading.Condition()
        self._waiting: list[_Ticket] = []
        self._busy = self._busy_large = 0
        self._closed = False
        self._idle: list[DecodeProcess] = []
        self._all: set[DecodeProcess] = set()
        self._end = weakref.finalize(self, _close_all, self._all)

    def close(self) -> None:
        """Ends all processes; what is being decoded fails."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            running = [process for process in self._all if process not in self._idle]
        for process in running:
            process.kill()
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)
        self._end()

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        with self._changed:
            return [process.pid for process in self._all if process.alive]

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
        task = _task("image", data, limits)
        for large in (False, True):
            task["max_work"] = None if large else _SMALL_WORK
            with self._process(large, len(data), param, stop) as process:
                with share(data) as shared:
                    process.ask(task, shared.descriptor)
                deadline = time.monotonic() + limits.max_image_decode_seconds
                try:
                    pixels = process.receive_pixels(deadline)
                except TimeoutError:
                    raise _too_slow("image", limits.max_image_decode_seconds) from None
                if not isinstance(pixels, int):
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
        self, large: bool, num_bytes: int, param: str | None, stop: Stop
    ) -> Iterator[DecodeProcess]:
        """A process for one task. Whatever way a task ends, the next one finds a sound one."""
        self._take_place(large, num_bytes, stop)
        process, sound = None, False
        try:
            process = self._start()
            try:
                with stop.calling(process.kill):
                    yield process
            finally:
                sound = not (process.awaiting or stop.is_set or self._closed)
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
            if process is not None:
                self._put_back(process) if sound else self._replace(process)
            self._leave_place(large)

    def _take_place(self, large: bool, num_bytes: int, stop: Stop) -> None:
        mine = _Ticket(large, time.monotonic() + num_bytes / _BYTES_PER_SECOND)

        def next_ticket() -> _Ticket | None:
            if self._busy >= self._size:
                return None
            room = self._busy_large < max(self._size - 1, 1)
            fit = (each for each in self._waiting if room or not each.large)
            return min(fit, key=lambda each: each.turn, default=None)

        def wake() -> None:
            with self._changed:
                self._changed.notify_all()

        with stop.calling(wake), self._changed:
            self._waiting.append(mine)
            try:
                self._changed.wait_for(lambda: stop.is_set or self._closed or next_ticket() is mine)
                stop.check()
                if self._closed:
                    raise EngineClosedError("the engine is closed")
                self._busy += 1
                self._busy_large += large
            finally:
                self._waiting.remove(mine)
                self._changed.notify_all()

    def _leave_place(self, large: bool) -> None:
        with self._changed:
            self._busy -= 1
            self._busy_large -= large
            self._changed.notify_all()

    def _start(self) -> DecodeProcess:
        while True:
            with self._changed:
                process = self._idle.pop() if self._idle else None
            if process is not None and not process.alive:
                self._drop(process)
                continue
            if process is None:
                process = DecodeProcess()
                with self._changed:
                    self._all.add(process)
            try:
                process.wait_until_ready()
            except VlmServeError:
                self._drop(process)
                raise
            return process

    def _put_back(self, process: DecodeProcess) -> None:
        with self._changed:
            self._idle.append(process)

    def _replace(self, process: DecodeProcess) -> None:
        """Whoever comes next need not wait for another one's start: that begins at once, and where
        one had to end, more will have to, so that there is one to spare from then on."""
        self._drop(process)
        with contextlib.suppress(VlmServeError), self._changed:  # it may be told the next one
            while not self._closed and len(self._all) <= min(self._size, self._busy):
                process = DecodeProcess()
                self._all.add(process)
                self._idle.insert(0, process)  # those that have started are taken first

    def _drop(self, process: DecodeProcess) -> None:
        with self._changed:
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
            assert not isinstance(pixels, int)
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


def _task(kind: str, data: bytes, limits: MediaLimits) -> dict[str, Any]:
    numbers = {
        field.name: value
        for field in dataclasses.fields(limits)
        if isinstance(value := getattr(limits, field.name), int | float)
    }
    return {"kind": kind, "size": len(data), "limits": numbers}


def _too_slow(kind: str, seconds: float) -> MediaError:
    return MediaError(f"decoding the {kind} takes longer than {seconds:g} seconds")


def _close_all(processes: set[DecodeProcess]) -> None:
    while processes:
        processes.pop().close()
