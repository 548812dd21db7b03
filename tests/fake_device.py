"""A device that works behind the host, as a GPU does, in the host's memory.

Work queues up in streams. It runs when somebody waits for it, and not before; a stream's work runs
in its order, and two streams have no order but that of the events between them. Memory that a copy
reads is therefore read as late as a GPU may read it. `FakeTorch` gives a module the functions of
`torch.cuda` that lead here, so that the module's own calls are what is tested. Graphs and the
device's own memory: `fake_graphs`.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from fake_graphs import Eager, Graph, Memory, logging

Work = Callable[[], None]


class _Mark:
    """A place in a stream: reached or not."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.reached = False

    def reach(self) -> None:
        self.reached = True


class Stream:
    """A queue of work on a device, with the methods of `torch.cuda.Stream`."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.queued: deque[Work | _Mark] = deque()
        device.streams.append(self)

    def synchronize(self) -> None:
        """Run all that is queued here, and what it waits for."""
        with self.device.lock:
            while self.queued and not self.device.working:
                self.run_next()

    def wait_stream(self, other: Stream) -> None:
        """Let later work here wait for all that is queued there."""
        event = Event(self.device)
        event.record(other)
        event.wait(self)

    def run_next(self) -> None:
        """Run one piece of work, or reach the mark of another stream that it waits for."""
        work = self.queued.popleft()
        if isinstance(work, _Mark):
            work.stream.run_until(work)
            return
        self.device.working = True
        try:
            work()
        finally:
            self.device.working = False

    def run_until(self, mark: _Mark) -> None:
        while not mark.reached:
            self.run_next()


class Event:
    """A place in a stream that others wait for, with the methods of `torch.cuda.Event`. As there,
    nobody waits for one that was not recorded."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._mark: _Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._device.current
        with self._device.lock:
            self._mark = _Mark(stream)
            stream.queued.append(self._mark.reach)

    def wait(self, stream: Stream | None = None) -> None:
        """Let later work of a stream wait for this place."""
        if self._mark is not None:
            (stream or self._device.current).queued.append(self._mark)

    def synchronize(self) -> None:
        with self._device.lock:
            if self._mark is not None and not self._device.working:
                self._mark.stream.run_until(self._mark)

    def query(self) -> bool:
        return self._mark is None or self._mark.reached


class FakeDevice:
    """Streams and what is queued in them.

    Args:
        seed: which stream goes first where none has to wait.

    Attributes:
        current: the stream that work is queued in.
        streams: all of them; the first one is the default stream.
        working: True within a piece of work, where nothing waits.
        longest: most pieces of work that were queued at one time, events left out.
        replays: graphs that have run.
        captures: all captures, as they were asked for.
        capturing: the one in progress.
        memory: of what is computed here.
        lock: held by the thread that queues or waits.
    """

    def __init__(self, seed: int = 0) -> None:
        self.streams: list[Stream] = []
        self.current = Stream(self)
        self.working = False
        self.longest = self.replays = 0
        self.captures: list[Capture] = []
        self.capturing: Capture | None = None
        self.memory = Memory()
        self.lock = threading.RLock()
        self._queued = 0
        self._rng = random.Random(seed)

    def queue(self, work: Work) -> None:
        """Queue work in the current stream. What is called within other work is part of that."""

        def run() -> None:
            self._queued -= 1
            work()

        with self.lock:
            if self.working:
                work()
                return
            self._queued += 1
            self.longest = max(self.longest, self._queued)
            self.current.queued.append(run)

    def replay(self, work: Work) -> None:
        """Queue a graph's log."""

        def run() -> None:
            self.replays += 1
            work()

        self.queue(run)

    def in_memory(self) -> Eager:
        """Return a mode in which results lie in the device's memory."""
        return Eager(self.memory)

    def synchronize(self, device: object = None) -> None:
        """Run all that is queued in any stream."""
        with self.lock:
            while not self.working and (busy := [each for each in self.streams if each.queued]):
                self._rng.choice(busy).run_next()

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Queue work in another stream inside the block."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 host memory whose copies to the device are queued; not zeros, since what a
        step does not write is of some step before."""
        memory = torch.full((num_bytes,), 0x7F, dtype=torch.uint8).as_subclass(Pinned)
        memory.device_of_copies = self
        return memory


class Pinned(torch.Tensor):
    """Pinned host memory: a copy of it reads it when the device comes to the copy."""

    device_of_copies: FakeDevice

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        copies = func is torch.Tensor.copy_ and isinstance(args[1], Pinned)
        if copies and not isinstance(args[0], Pinned):
            return _copy(*args, **kwargs)
        if func is torch.Tensor.copy_ and not copies and kwargs.get("non_blocking"):
            return _copy_back(*args)
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        owner = next((each for each in args if isinstance(each, Pinned)), None)
        return _kept(result, owner)


def _kept(result: Any, owner: Pinned | None) -> Any:
    """Return views of pinned memory as such, and other tensors as plain ones."""
    if isinstance(result, (tuple, list)):
        return type(result)(_kept(each, owner) for each in result)
    if not isinstance(result, Pinned) or owner is None:
        return result
    if result.untyped_storage().data_ptr() != owner.untyped_storage().data_ptr():
        return result.as_subclass(torch.Tensor)
    result.device_of_copies = owner.device_of_copies
    return result


def _copy(target: torch.Tensor, source: Pinned, non_blocking: bool = False) -> torch.Tensor:
    """Queue a copy; wait for it, as torch does, unless that is said to be needless."""
    device, plain = source.device_of_copies, source.as_subclass(torch.Tensor)

    def copy() -> None:
        with torch.inference_mode():
            target.copy_(plain)

    device.queue(copy)
    if not non_blocking:
        device.current.synchronize()
    return target


def _copy_back(target: Pinned, source: torch.Tensor) -> torch.Tensor:
    """Queue a copy of the device's memory to the host."""
    plain = target.as_subclass(torch.Tensor)

    def copy() -> None:
        with torch.inference_mode():
            plain.copy_(source)

    target.device_of_copies.queue(copy)
    return target


class Capture:
    """A capture, with the arguments of `torch.cuda.graph`.

    Args:
        cuda: where it takes place.
        graph: gets the log.
        pool: memory of the results; None: the graph's own.
        stream: that is captured; None: that of the process's first capture, whichever its device.
        capture_error_mode: see torch.
    """

    def __init__(
        self,
        cuda: FakeCuda,
        graph: Graph,
        pool: Memory | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        self.graph, self.pool, self.errors = graph, pool, capture_error_mode
        self.stream = stream or cuda.capture_stream()
        self._left = ExitStack()

    def __enter__(self) -> None:
        device = self.stream.device
        assert device.capturing is None, "one capture at a time"
        device.synchronize()
        device.captures.append(self)
        with ExitStack() as entered:
            entered.enter_context(device.using(self.stream))
            entered.enter_context(logging(self.graph, self.pool or Memory(), device.memory))
            device.capturing = self
            entered.callback(setattr, device, "capturing", None)
            self._left = entered.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._left.__exit__(*error)


_Stream = Stream
Place = torch.device | FakeDevice
"""How callers name a device."""


class FakeTorch:
    """In place of a module's `torch`: its `torch.cuda` and its pinned memory are the devices'.

    Args:
        devices: "cuda:0" and so on; the first one is the current one.
    """

    def __init__(self, *devices: FakeDevice) -> None:
        self.cuda = FakeCuda(devices)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, size: int, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if not pin_memory:
            return torch.empty(size, **options)
        assert options == {"dtype": torch.uint8}
        return self.cuda.device.pinned(size)


class FakeCuda:
    """What `torch.cuda` has for streams, events and graphs.

    Attributes:
        device: the current one.
    """

    def __init__(self, devices: Sequence[FakeDevice]) -> None:
        self.device, self._devices = devices[0], devices
        self._first: Stream | None = None

    def Stream(self, device: Place | None = None) -> Stream:
        return Stream(self._of(device))

    def Event(self) -> Event:
        return Event(self.device)

    def CUDAGraph(self) -> Graph:
        return Graph(lambda work: self.device.replay(work))

    def graph(self, *arguments: Any, **options: Any) -> Capture:
        return Capture(self, *arguments, **options)

    def graph_pool_handle(self) -> Memory:
        return Memory()

    def synchronize(self, device: Place | None = None) -> None:
        self._of(device).synchronize()

    def current_stream(self, device: Place | None = None) -> _Stream:
        return self._of(device).current

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        """Queue work in a stream inside the block, whose device is the current one then."""
        before, self.device = self.device, stream.device
        try:
            with stream.device.using(stream):
                yield
        finally:
            self.device = before

    def capture_stream(self) -> _Stream:
        """Return the stream of captures that name none: one a process."""
        self._first = self._first or Stream(self.device)
        return self._first

    def _of(self, device: Place | None) -> FakeDevice:
        if isinstance(device, FakeDevice):  # as a stream names it
            return device
        return self.device if device is None else self._devices[device.index or 0]
