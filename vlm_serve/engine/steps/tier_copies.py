"""Copies between a GPU's pools and the host beside the stream of steps, for the lower cache tiers.

What is evicted is gathered in the device's memory in the order of steps, so that the next step may
write over it, and copied to the host behind that, while steps go on. What is loaded is copied by
another stream, behind all that was queued before, and a step waits for what it needs of it alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from vlm_serve.cache.tiers.entry import Content
from vlm_serve.engine.steps.step_tables import Step

_ALIGNMENT = 256
"""Bytes to whose multiples the sizes of gathered entries are rounded up."""
Place = tuple[str, int]
"""A block or a state row: its unit and its number."""


def room_bytes(largest: int) -> int:
    """Return the bytes in which entries wait for their copy to the host, on the device and as many
    of pinned memory: for two of the largest, so that one is gathered while the other is copied."""
    return 2 * -(-largest // _ALIGNMENT) * _ALIGNMENT


class CopyStream:
    """A stream of copies between a GPU and the host.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 host memory that copies read and write without a wait."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def gather(self, target: torch.Tensor, parts: Iterable[torch.Tensor]) -> None:
        """Queue copies of tensors within the device, as bytes one behind the other, in the order of
        steps."""
        first = 0
        for part in parts:
            last = first + part.numel() * part.element_size()
            target[first:last].view(part.dtype).view(part.shape).copy_(part)
            first = last

    def save(self, target: torch.Tensor, source: torch.Tensor) -> Step:
        """Queue a copy to the host behind all that is queued. Return a function that waits for it,
        on any thread."""
        done = self._copied([target], [source])

        def wait() -> None:
            done.synchronize()
            kept.clear()

        kept = [source]  # Its memory would be given to a step before the copy.
        return wait

    def load(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Step:
        """Queue copies to the device behind all that is queued. Return a function that lets later
        steps wait for them, and nothing else."""
        done = self._copied(targets, sources)

        def wait() -> None:
            done.wait(torch.cuda.current_stream(self._stream.device))

        return wait

    def _copied(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            done.record()
        return done


class Saving:
    """Content on its way to the host; see `cache.tiers.entry.Arriving`."""

    def __init__(self, memory: torch.Tensor, wait: Step) -> None:
        self._lock, self._size = threading.Lock(), memory.numel()
        self._memory: torch.Tensor | None = memory
        self._wait, self._content = wait, memoryview(b"")

    def __len__(self) -> int:
        return self._size

    def content(self) -> Content:
        with self._lock:
            if self._memory is not None:
                self._wait()
                # numpy copies without the interpreter's lock: steps are planned meanwhile.
                own = np.empty(self._size, np.uint8)
                np.copyto(own, self._memory.numpy())
                self._content, self._memory = own.data, None
            return self._content


class SaveRing:
    """Memory in which entries wait for their copy to the host: as much on the device as there,
    used in turn.

    Args:
        stream: of the copies.
        num_bytes: see `room_bytes`.
        device: of the pools.
    """

    def __init__(self, stream: CopyStream, num_bytes: int, device: torch.device) -> None:
        self._stream = stream
        with torch.inference_mode(False):
            self._there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._here = stream.host_memory(num_bytes)
        self._first = 0
        self._taken: deque[tuple[int, int, Saving]] = deque()

    def save(self, parts: Sequence[torch.Tensor]) -> Saving:
        """Queue the copy of tensors to the host, as bytes one behind the other."""
        size = sum(part.numel() * part.element_size() for part in parts)
        first = self._first if self._first + size <= len(self._here) else 0
        last = first + size
        assert last <= len(self._here), "room_bytes is that of the largest entry"
        self._free(first, last)
        self._stream.gather(self._there[first:last], parts)
        memory = self._here[first:last]
        saving = Saving(memory, self._stream.save(memory, self._there[first:last]))
        self._taken.append((first, last, saving))
        self._first = -(-last // _ALIGNMENT) * _ALIGNMENT
        return saving

    def _free(self, first: int, last: int) -> None:
        """Have what lies there read by the host. It was, unless more is evicted than is copied."""
        while self._taken and any(begin < last and end > first for begin, end, _ in self._taken):
            self._taken.popleft()[2].content()


class Arrivals:
    """Blocks and rows that are being loaded.

    Args:
        stream: of the copies.
    """

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._waits: dict[Place, Step] = {}

    def load(
        self, place: Place, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        """Queue the copy of an entry out of pinned memory."""
        self._waits[place] = self._stream.load(targets, sources)

    def __bool__(self) -> bool:
        return bool(self._waits)

    def wait_for(self, places: Iterable[Place]) -> None:
        """Let the next step wait for those of these places that are being loaded."""
        for place in places:
            if (wait := self._waits.pop(place, None)) is not None:
                wait()
