"""Processes that decode media: light ones for small pictures, heavy ones for everything else.

A decode ends at its deadline, when it takes too much memory, or when its client leaves. Its process
ends with it, and another one is forked when needed. Heavy processes run at low priority, few at a
time and for one task each. So neither their work nor their memory gets in the way of other
requests. Light processes are reused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from vlm_serve.errors import EngineClosedError, MediaError, OverloadedError, VlmServeError
from vlm_serve.preprocess.media.decode_wire import GoneError, receive, send, share, take_array
from vlm_serve.preprocess.media.images import Pixels, is_page
from vlm_serve.preprocess.media.limits import LostFramesError, MediaLimits
from vlm_serve.system import child, children
from vlm_serve.system.children import CRASHES
from vlm_serve.system.stopping import Stop

LIGHT_FILE_BYTES = 2 << 20
LIGHT_WORK = 1 << 22
"""An image is light up to this many pixels, counted once per pass over them. The header gives the
number."""
LIGHT_DECODE_BYTES = 256 << 20
"""Memory limit for a light image, several times the usual need; an image that needs more is
heavy."""
PROCESS_BYTES = 64 << 20
"""Memory of a process before it decodes anything: Python, NumPy, Pillow and FFmpeg. Most of it is
shared by all of them."""
HEAVY_NICENESS = 10
# A video's process reports a passed deadline itself; after this grace period it is killed.
_GRACE_SECONDS = 10.0
_MOST_STARTS = 3
MOST_AHEAD = 8
"""Decoded frames of a video that wait for their resize: enough for a decoder's uneven pace."""
_AHEAD_BYTES = 64 << 20
_DAMAGED = "the medium is damaged or takes too much memory to decode"

# Waiting decodes are served by arrival time plus a penalty: one second for this many bytes of file.
_BYTES_PER_SECOND = 1 << 20
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
T = TypeVar("T")


class DecoderEndedError(OverloadedError):
    """A decoding process was ended, which may be no fault of its medium; see `twice`.

    Args:
        crashed: it ended by a fault of its own code, such as SIGSEGV.
    """

    def __init__(self, *, crashed: bool) -> None:
        super().__init__("the media decoder was ended, twice: try again later")
        self.crashed = crashed


def twice(decode: Callable[[], T]) -> T:
    """Return what is decoded; if the process is ended meanwhile, decode once more.

    Raises MediaError if both processes crash; DecoderEndedError if the second one is ended too.
    """
    try:
        return decode()
    except DecoderEndedError as error:
        crashed = error.crashed
    try:
        return decode()
    except DecoderEndedError as error:
        if crashed and error.crashed:
            raise MediaError(_DAMAGED) from None
        raise


def default_slots() -> tuple[int, int]:
    """Return the default numbers of light and of heavy processes."""
    processors = os.cpu_count() or 1
    return min(max(2, processors), 4), min(max(2, processors), 3)


class Decoders:
    """Decodes encoded images and videos in processes started on demand.

    Args:
        light, heavy: maximum number of processes of either kind; None: as in `default_slots`.

    Thread-safe. An unclosed instance ends its processes when it is garbage-collected.
    """

    def __init__(self, light: int | None = None, heavy: int | None = None) -> None:
        slots = default_slots()
        self.light, self.heavy = DecodeSlots(light or slots[0]), DecodeSlots(heavy or slots[1])
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[DecodeProcess] = []
        self._all: set[DecodeProcess] = set()
        self._fork_server = ForkServer()
        self._end = weakref.finalize(self, _close_all, self._all, self._fork_server)

    def close(self) -> None:
        """End all processes; running decodes fail."""
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
        """Ids of the running processes."""
        with self._lock:
            return [process.pid for process in self._all if process.pid and process.alive]

    @contextlib.contextmanager
    def image(self, data: bytes, limits: MediaLimits, stop: Stop) -> Iterator[Pixels]:
        """Yield the pixels of an encoded image, as `media_image.decode_opened` returns them.

        The block counts as part of the decoding: the slot stays occupied until it ends.

        Raises MediaError, StoppedError; OverloadedError if no process can be started, or the
        server lacks memory; DecoderEndedError for `twice`.
        """
        if len(data) > limits.max_image_bytes:
            raise MediaError(f"the image is over {limits.max_image_bytes} bytes")
        may_be_light = len(data) <= LIGHT_FILE_BYTES and not is_page(data)
        for heavy in (False, True) if may_be_light else (True,):
            with self._process(heavy, len(data), stop) as process:
                with stop.timed("decode"):
                    pixels = _decoded(process, data, limits, heavy)
                if pixels is not None:
                    yield pixels
                    return

    def pages(self, limits: MediaLimits, data: bytes) -> int:
        """Return the number of pages of a PDF document. Raises as `twice` and `image` do."""

        def count() -> int:
            with self._process(True, len(data), Stop()) as process:
                _ask(process, "document", data, limits)
                message, _ = _receive(process, "document", limits.max_image_decode_seconds)
                return int(message["pages"])

        return twice(count)

    @contextlib.contextmanager
    def video(
        self,
        data: bytes,
        fps: float | None,
        limits: MediaLimits,
        stop: Stop,
        *,
        survey: bool = False,
    ) -> Iterator[DecodedVideo]:
        """Yield an encoded video, as `media_video.EncodedVideo` reads it; valid inside the block.

        Raises as `image` does.
        """
        if len(data) > limits.max_video_bytes:
            raise MediaError(f"the video is over {limits.max_video_bytes} bytes")
        with self._process(True, len(data), stop) as process:
            _ask(process, "video", data, limits, fps=fps, survey=survey)
            video = DecodedVideo(process, limits)
            try:
                yield video
            finally:
                video.end()

    @contextlib.contextmanager
    def _process(self, heavy: bool, num_bytes: int, stop: Stop) -> Iterator[DecodeProcess]:
        """Yield a process for one task.

        However a task ends, the next one gets a working process.
        """
        with (self.heavy if heavy else self.light).acquire(num_bytes, stop):
            with stop.timed("place"):
                process = self._start(heavy)
            sound = False
            try:
                try:
                    with stop.calling(process.kill):
                        yield process
                finally:
                    sound = not (heavy or process.awaiting or stop.is_set or self._closed)
            except GoneError:
                sound = False
                stop.check()
                if self._closed:
                    raise EngineClosedError("the engine is closed") from None
                raise process.failure() from None
            except (MemoryError, OSError):
                raise OverloadedError(
                    "memory or open files ran out while a medium was decoded: try again later"
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
        for _ in range(_MOST_STARTS):
            process = DecodeProcess(self._fork_server, HEAVY_NICENESS if heavy else 0)
            with self._lock:
                self._all.add(process)
            ready = False
            try:
                ready = process.wait_until_ready()
            finally:
                if not ready:
                    self._drop(process)
            if ready:
                return process
            if self._closed:
                raise EngineClosedError("the engine is closed")
        raise _not_started()

    def _put_back(self, process: DecodeProcess) -> None:
        with self._lock:
            self._idle.append(process)

    def _drop(self, process: DecodeProcess) -> None:
        with self._lock:
            self._all.discard(process)
        process.close()


class DecodedVideo:
    """A `Video` of another process, decoding a few frames ahead of the consumer.

    Attributes:
        num_decoded: frames that were decoded for those that were asked for.
    """

    def __init__(self, process: DecodeProcess, limits: MediaLimits) -> None:
        self._process, self._limits = process, limits
        seconds = limits.max_decode_seconds
        message, descriptor = _receive(process, "video", seconds, self._deadline())
        self.fps = float(message["fps"])
        self.steady, self.cut_short = bool(message["steady"]), bool(message["cut_short"])
        times = take_array(descriptor, (int(message["count"]),), np.float64)
        self.times: Sequence[float] = times.tolist()
        self.sound, self.num_decoded = True, 0
        self._open = True
        self._asked = 0

    def frames(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """See `Video.frames`; may be called once. Raises MediaError."""
        assert self._open
        self._process.send({"indices": list(indices)})
        deadline = self._deadline()
        ahead = 1
        for left in range(len(indices), 0, -1):
            while self._asked < min(ahead, left):
                self._process.ask({"next": True})
                self._asked += 1
            seconds = self._limits.max_decode_seconds
            message, descriptor = _receive(self._process, "video", seconds, deadline)
            self._asked -= 1
            pixels = _take_pixels(message, descriptor)
            self.sound, self.num_decoded = bool(message["sound"]), int(message["decoded"])
            ahead = max(1, min(MOST_AHEAD, _AHEAD_BYTES // max(1, pixels.nbytes)))
            yield pixels
        self._open = False

    def end(self) -> None:
        """Free the process for the next task."""
        if self._open and not self._asked and not self._process.awaiting:
            self._process.send({"stop": True})

    def _deadline(self) -> float:
        return time.monotonic() + self._limits.max_decode_seconds + _GRACE_SECONDS


def _not_started() -> OverloadedError:
    return OverloadedError("the media decoder did not start: try again later")


def _decoded(
    process: DecodeProcess, data: bytes, limits: MediaLimits, heavy: bool
) -> Pixels | None:
    """Decode an image; return None if it exceeds the work or memory limit of a light process."""
    light = {} if heavy else {"max_work": LIGHT_WORK, "max_bytes": LIGHT_DECODE_BYTES}
    _ask(process, "image", data, limits, **{"max_work": None, **light})
    message, descriptor = _receive(process, "image", limits.max_image_decode_seconds)
    return _take_pixels(message, descriptor) if descriptor >= 0 else None


def _ask(
    process: DecodeProcess, kind: str, data: bytes, limits: MediaLimits, **more: float | None
) -> None:
    """Send a task: what to decode a file as, with its limits."""
    numbers = {
        field.name: value
        for field in dataclasses.fields(limits)
        if isinstance(value := getattr(limits, field.name), int | float)
    }
    task = {"kind": kind, "size": len(data), "limits": numbers}
    with share(data) as shared:
        process.ask(task | {"max_bytes": limits.max_decode_bytes} | more, shared.descriptor)


def _receive(
    process: DecodeProcess, kind: str, seconds: float, deadline: float | None = None
) -> tuple[dict[str, Any], int]:
    """Return a reply and its descriptor. Raises MediaError for one that takes too long: longer than
    `seconds`, or past a deadline that allows for more."""
    try:
        return process.receive(time.monotonic() + seconds if deadline is None else deadline)
    except TimeoutError:
        raise MediaError(f"decoding the {kind} takes longer than {seconds:g} seconds") from None


def _close_all(processes: set[DecodeProcess], fork_server: ForkServer) -> None:
    while processes:
        processes.pop().close()
    fork_server.close()


class DecodeSlots:
    """A fixed number of slots for decoding. Thread-safe.

    Args:
        count: number of slots.

    Attributes:
        busy: slots in use.
        waiting: callers waiting for a slot.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._queue: list[tuple[float, object]] = []
        self._closed = False
        self.busy = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def close(self) -> None:
        """Fail all waiters with EngineClosedError and wait until no slot is in use."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.busy)

    @contextlib.contextmanager
    def acquire(self, num_bytes: int, stop: Stop) -> Iterator[None]:
        """Hold a slot for the block. Raises StoppedError, EngineClosedError."""
        self._acquire(num_bytes, stop)
        try:
            yield
        finally:
            with self._changed:
                self.busy -= 1
                self._changed.notify_all()

    def _acquire(self, num_bytes: int, stop: Stop) -> None:
        ticket = (time.monotonic() + num_bytes / _BYTES_PER_SECOND, object())

        def is_next() -> bool:
            first = min(self._queue, key=lambda entry: entry[0])
            return stop.is_set or self._closed or (self.busy < self._count and first is ticket)

        def wake() -> None:
            with self._changed:
                self._changed.notify_all()

        with stop.timed("place"), stop.calling(wake), self._changed:
            self._queue.append(ticket)
            try:
                self._changed.wait_for(is_next)
                stop.check()
                if self._closed:
                    raise EngineClosedError("the engine is closed")
                self.busy += 1
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()


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
        """Start a process. Raises OverloadedError if the fork server cannot be started."""
        with contextlib.ExitStack() as unless_started:
            try:
                ours, theirs = socket.socketpair()
                unless_started.callback(ours.close)
                with theirs, self._lock:
                    if self._process is not None:
                        try:
                            self._ask_for(theirs, niceness)
                        except GoneError:
                            self._end()
                    if self._process is None:
                        self._start()
                        self._ask_for(theirs, niceness)
                    unless_started.pop_all()
                    return Fork(ours, self._process, self._answered)
            except (OSError, GoneError):
                raise _not_started() from None

    def _ask_for(self, theirs: socket.socket, niceness: int) -> None:
        assert self._sock is not None
        send(self._sock, {"niceness": niceness}, theirs.fileno())

    def status(self, fork: Fork, pid: int) -> int | None:
        """Return the status with which a process has ended, as `os.waitpid` does; None if it is
        not known, because the fork server has ended too."""
        try:
            ours, theirs = socket.socketpair()
            with ours:
                with theirs, self._lock:
                    if fork.server is not self._process or self._sock is None:
                        return None
                    send(self._sock, {"pid": pid}, theirs.fileno())
                status: int | None = receive(ours, time.monotonic() + _FORK_SECONDS)[0]["status"]
                return status
        except (OSError, GoneError):
            return None

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
                "vlm_serve.preprocess.media.decode_worker",
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

    Raises OverloadedError if it does not start.
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

        Returns False if it does not start although others did, or its fork server has died: that
        is stopped or hangs, and is replaced.

        Raises OverloadedError if it does not start.
        """
        try:
            message, lifeline = receive(self._sock, self._deadline)
        except (GoneError, TimeoutError) as error:
            self._fork_server.replace(self._fork)
            if self._fork.proven or isinstance(error, GoneError):
                return False
            raise _not_started() from None
        self._fork_server.answered(self._fork)
        with self._lock:
            self._lifeline, self.pid = lifeline, int(message["pid"])
        return True

    @property
    def alive(self) -> bool:
        return not self._ended(0)

    def failure(self) -> VlmServeError:
        """Return the error of a process that nobody here has ended, but that did not reply."""
        if self.alive:  # What it sent makes no sense.
            return MediaError(_DAMAGED)
        status = self._fork_server.status(self._fork, self.pid)
        if status is not None and os.WIFEXITED(status):
            return MediaError(_DAMAGED)
        return DecoderEndedError(crashed=status is not None and os.WTERMSIG(status) in CRASHES)

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
            error = LostFramesError if message.get("lost") else MediaError
            raise error(str(message["error"]))
        return message, descriptor


def _take_pixels(message: dict[str, Any], descriptor: int) -> npt.NDArray[np.uint8]:
    """Map the uint8 `[height, width, 3]` of a reply. Raises as `map_array` does."""
    return take_array(descriptor, tuple(map(int, message["shape"])), np.uint8)
