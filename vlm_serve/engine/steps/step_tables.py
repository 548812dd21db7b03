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

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy within the device."""

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

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Step:
        target.copy_(source, non_blocking=True)
        read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        read.record()
        return read.synchronize


class Table(NamedTuple):
    """A table, and what stands in it where a step has nothing to write. Of a wide one, a step
    writes and reads the first columns alone."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    padding: int = 0
    wide: bool = False

    def narrowed(self, columns: int | None) -> Table:
        """Return a wide table with fewer columns, and any other as it is; None: all columns."""
        if not self.wide or columns is None:
            return self
        return self._replace(shape=(self.shape[0], min(columns, self.shape[1])))


Tables = Mapping[str, Table]
"""Tables of a part of a step, by name."""
Parts = Mapping[str, dict[str, torch.Tensor]]
"""The memory of tables, by part of a step and name."""

_ALIGNMENT = 16
"""Alignment of tables in bytes: Triton specialises kernels on the alignment of their pointers."""
_BUFFERS = 2
"""Number of host buffers: one is filled while the copy of the other waits, so the device always has
a step."""

_KEPT_LAYOUTS = 4
"""Numbers of columns in use, of the latest steps, for which views of the memory are kept."""


class HostRing:
    """Ring of host buffers for copies to the device; shared by steps of all sizes.

    Args:
        device: makes the copies.
    """

    def __init__(self, device: GraphDevice) -> None:
        self.device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * _BUFFERS
        self._reads: list[Step | None] = [None] * _BUFFERS
        self._next = 0

    def reserve(self, num_bytes: int) -> None:
        """Allocate buffers of at least `num_bytes`; between steps only."""
        for place, buffer in enumerate(self._buffers):
            if buffer.numel() < num_bytes:
                self._wait(place)
                self._buffers[place] = self.device.host_memory(num_bytes)

    def take(self) -> torch.Tensor:
        """Return the next buffer to fill; it holds the data of an earlier step."""
        self._wait(self._next)
        return self._buffers[self._next]

    def send(self, target: torch.Tensor) -> None:
        """Queue the copy of the buffer returned by `take` to the device."""
        source = self._buffers[self._next][: target.numel()]
        self._reads[self._next] = self.device.send(target, source)
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
    """All tables of one captured step, in one piece. Of a wide table the columns in use are sent,
    and spread over its rows on the device; what is behind them is of some step before.

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
        self._parts, self._ring, self._layout = parts, ring, _Layout(0, ())
        self._layouts: dict[int | None, _Layout] = {}
        size = size_of(parts)
        with torch.inference_mode(False):
            ring.reserve(size)
            self._flat = (memory or TableMemory(device)).first(size)
        whole = _sent_bytes(parts, None)
        self.fixed = _carve(parts, self._flat[:whole], wide=False)
        for part, tables in _carve(parts, self._flat[whole:], wide=True).items():
            self.fixed[part].update(tables)

    def stage(self, columns: int | None = None) -> Parts:
        """Return host tables of padding, for a step to write over.

        Args:
            columns: of wide tables, which have so many here; None: all.
        """
        self._layout, buffer = self._layout_of(columns), self._ring.take()
        staged, empty = self._layout.staged_in(buffer, self._parts, columns)
        for table, padding in empty:
            table.fill_(padding)
        return staged

    def send(self) -> None:
        """Queue the copy of the tables returned by `stage` to the device."""
        self._ring.send(self._flat[: self._layout.num_bytes])
        for target, source in self._layout.moves:
            self._ring.device.move(target, source)

    def _layout_of(self, columns: int | None) -> _Layout:
        """Return how tables of so many columns lie; few numbers of columns follow each other."""
        layout = self._layouts.get(columns)
        if layout is None:
            if len(self._layouts) == _KEPT_LAYOUTS:
                self._layouts.clear()
            sent = _sent_bytes(self._parts, columns)
            arrived = _carve(self._parts, self._flat[:sent], columns=columns)
            moves = [
                (self.fixed[part][name][:, : source.shape[1]], source)
                for part, tables in arrived.items()
                for name, source in tables.items()
                if self._parts[part][name].wide
            ]
            layout = self._layouts[columns] = _Layout(sent, tuple(moves))
        return layout


class _Layout:
    """How the tables of steps with one number of columns lie in memory.

    Args:
        num_bytes: bytes that are sent.
        moves: (table, columns in use as they were sent) of wide tables, on the device.
    """

    def __init__(
        self, num_bytes: int, moves: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    ) -> None:
        self.num_bytes, self.moves = num_bytes, moves
        self._staged: dict[int, tuple[Parts, list[tuple[torch.Tensor, int]]]] = {}

    def staged_in(
        self, buffer: torch.Tensor, parts: Mapping[str, Tables], columns: int | None
    ) -> tuple[Parts, list[tuple[torch.Tensor, int]]]:
        """Return the tables in a host buffer, and each with its padding."""
        place = buffer.data_ptr()  # what is kept keeps the memory: nothing else lies there
        found = self._staged.get(place)
        if found is None:
            carved = _carve(parts, buffer[: self.num_bytes], columns=columns)
            empty = [
                (carved[part][name], table.padding)
                for part, tables in parts.items()
                for name, table in tables.items()
            ]
            found = self._staged[place] = carved, empty
        return found


def _carve(
    parts: Mapping[str, Tables],
    flat: torch.Tensor,
    *,
    columns: int | None = None,
    wide: bool | None = None,
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tables that lie in a piece of memory, one behind the other; wide ones are last.

    Args:
        columns: of wide tables; None: all.
        wide: only those; False: only the others; None: all.
    """
    carved: dict[str, dict[str, torch.Tensor]] = {part: {} for part in parts}
    place = 0
    for kind in (False, True):
        for part, tables in parts.items():
            for name, table in tables.items():
                table = table.narrowed(columns)
                if table.wide is not kind or wide not in (None, kind):
                    continue
                end = place + torch.Size(table.shape).numel() * table.dtype.itemsize
                carved[part][name] = flat[place:end].view(table.dtype).view(table.shape)
                place += _num_bytes(table)
    return carved


def size_of(parts: Mapping[str, Tables]) -> int:
    """Return the bytes of a step's tables; wide ones lie there as sent and as read."""
    tables = [table for part in parts.values() for table in part.values()]
    return sum(_num_bytes(table) * (1 + table.wide) for table in tables)


def _sent_bytes(parts: Mapping[str, Tables], columns: int | None) -> int:
    tables = (table for part in parts.values() for table in part.values())
    return sum(_num_bytes(table.narrowed(columns)) for table in tables)


def _num_bytes(table: Table) -> int:
    """Return a table's bytes, padded to the start of the next one."""
    size = torch.Size(table.shape).numel() * table.dtype.itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT
