"""Input tables of captured steps: at fixed addresses on a device, sent in one copy. Beside them is
the interface of a device to captured steps: graphs, and copies that are queued beside them.

The host runs ahead of the device. A copy out of pinned memory is only made when all earlier work is
done, which may be after the next step was planned. So tables are filled in a ring of host buffers,
and a buffer is reused only after its last copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

import torch

Step = Callable[[], None]
Size = TypeVar("Size")
Captured = TypeVar("Captured")

_WARM_UP = 2
"""Runs before a capture. In the first one, kernels are compiled and libraries allocate
workspaces."""
CAPTURE_ERRORS = "thread_local"
"""Only calls of the capturing thread may invalidate a capture. "global" would forbid allocations of
another engine that serves meanwhile."""


class GraphDevice(Protocol):
    """Runs steps repeatedly, from fixed inputs to fixed outputs."""

    def warm_up(self, step: Step) -> None:
        """Run a step once, under the conditions of a capture."""

    def capture(self, step: Step) -> Step:
        """Return a step that repeats this one on the current content of its inputs."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 host memory from which `send` copies without waiting."""

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Step:
        """Queue a copy to the device. Return a function that waits until the source has been
        read."""


class CaptureError(RuntimeError):
    """A step cannot be captured.

    Args:
        step: its kind and size.
        problem: what the driver or torch says.
    """

    def __init__(self, step: str, problem: RuntimeError) -> None:
        super().__init__(f"{step}: {str(problem).partition(chr(10))[0]}")
        self.step = step


@contextmanager
def naming(step: str) -> Iterator[None]:
    """Raise RuntimeErrors of the block as the CaptureError of a step."""
    try:
        yield
    except RuntimeError as error:
        raise CaptureError(step, error) from error


def largest_first(
    sizes: Sequence[Size], capture: Callable[[Size], Captured], name: str = "a step of {}"
) -> list[Captured]:
    """Capture steps of all sizes, given in ascending order, and return them in this order. The
    largest is captured first: the others reuse its memory. `name` is theirs in a CaptureError."""
    captured = []
    for size in reversed(sizes):
        with naming(name.format(size)):
            captured.append(capture(size))
    return captured[::-1]


class CudaGraphs:
    """Captures CUDA graphs with shared memory: only one of them runs at a time.

    torch's own stream for captures belongs to the process: to the device of its first capture, and
    to one capture at a time. So each engine has one of its own. Warm-ups run there too, because
    libraries keep their workspaces by stream.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def warm_up(self, step: Step) -> None:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)

    def capture(self, step: Step) -> Step:
        for _ in range(_WARM_UP):
            self.warm_up(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, CAPTURE_ERRORS):
            step()
        return graph.replay

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Step:
        target.copy_(source, non_blocking=True)
        read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        read.record()
        return read.synchronize


class Table(NamedTuple):
    """A table, and what stands in it where a step has nothing to write."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    padding: int = 0


Tables = Mapping[str, Table]
"""Tables of a part of a step, by name."""
Parts = Mapping[str, dict[str, torch.Tensor]]
"""The memory of tables, by part of a step and name."""

_ALIGNMENT = 16
"""Alignment of tables in bytes: Triton specialises kernels on the alignment of their pointers."""
_BUFFERS = 2
"""Number of host buffers: one is filled while the copy of the other waits, so the device always has
a step."""


class HostRing:
    """Ring of host buffers for copies to the device; shared by steps of all sizes.

    Args:
        device: makes the copies.
    """

    def __init__(self, device: GraphDevice) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * _BUFFERS
        self._reads: list[Step | None] = [None] * _BUFFERS
        self._next = 0

    def reserve(self, num_bytes: int) -> None:
        """Allocate buffers of at least `num_bytes`; between steps only."""
        for place, buffer in enumerate(self._buffers):
            if buffer.numel() < num_bytes:
                self._wait(place)
                self._buffers[place] = self._device.host_memory(num_bytes)

    def take(self) -> torch.Tensor:
        """Return the next buffer to fill; it holds the data of an earlier step."""
        self._wait(self._next)
        return self._buffers[self._next]

    def send(self, target: torch.Tensor) -> None:
        """Queue the copy of the buffer returned by `take` to the device."""
        source = self._buffers[self._next][: target.numel()]
        self._reads[self._next] = self._device.send(target, source)
        self._next = (self._next + 1) % _BUFFERS

    def _wait(self, place: int) -> None:
        read, self._reads[place] = self._reads[place], None
        if read is not None:
            read()


class TableMemory:
    """Memory for the tables of several steps: each step's are sent as a whole before it, over those
    of the step before.

    Args:
        device: of the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._whole = torch.empty(0, dtype=torch.uint8, device=device)

    def first(self, num_bytes: int) -> torch.Tensor:
        """Return the first bytes, uint8. If there are too few, there are new ones from then on, and
        earlier steps keep theirs: the largest step comes first."""
        if self._whole.numel() < num_bytes:
            # These are read and written inside and outside of inference mode.
            with torch.inference_mode(False):
                self._whole = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return self._whole[:num_bytes]


class StepTables:
    """All tables of one captured step, in one piece.

    Args:
        parts: tables by part of the step.
        ring: host buffers to fill.
        device: device that the step reads them on.
        memory: shared with other steps; None: of its own.

    Attributes:
        fixed: the tables on the device, undefined before the first `send`.
    """

    def __init__(
        self,
        parts: Mapping[str, Tables],
        ring: HostRing,
        device: torch.device,
        memory: TableMemory | None = None,
    ) -> None:
        self._parts, self._ring = parts, ring
        size = size_of(parts)
        with torch.inference_mode(False):
            ring.reserve(size)
            self._flat = (memory or TableMemory(device)).first(size)
        self.fixed = self._carve(self._flat)

    def stage(self) -> Parts:
        """Return host tables of padding, for a step to write over."""
        staged = self._carve(self._ring.take())
        for part, tables in self._parts.items():
            for name, table in tables.items():
                staged[part][name].fill_(table.padding)
        return staged

    def send(self) -> None:
        """Queue the copy of the tables returned by `stage` to the device."""
        self._ring.send(self._flat)

    def _carve(self, flat: torch.Tensor) -> Parts:
        carved: dict[str, dict[str, torch.Tensor]] = {}
        place = 0
        for part, tables in self._parts.items():
            carved[part] = {}
            for name, table in tables.items():
                end = place + torch.Size(table.shape).numel() * table.dtype.itemsize
                carved[part][name] = flat[place:end].view(table.dtype).view(table.shape)
                place += _num_bytes(table)
        return carved


def size_of(parts: Mapping[str, Tables]) -> int:
    """Return the bytes of a step's tables."""
    return sum(_num_bytes(table) for part in parts.values() for table in part.values())


def _num_bytes(table: Table) -> int:
    """Return a table's bytes, padded to the start of the next one."""
    size = torch.Size(table.shape).numel() * table.dtype.itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT
