"""Tensors in pages of 2 MB, for what stays for long and is read again and again: weights and pools.

A processor keeps the places of few pages at hand, and at batch 1 all weights pass by for every
token: in pages of 4 KB decoding is a tenth to a third slower (benchmarks/notes/steps-cpu.md).
They also leave no holes in the heap, where what is needed for a moment would lie between them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref

import torch

_PAGE = 2 << 20
_ROOM = 256 << 20
_ALIGNMENT = 64


class _Rooms:
    """Address space, from which tensors take one after the other. A room goes back to the system
    with the last tensor in it; what was never written takes no memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._room: weakref.ref[mmap.mmap] | None = None
        self._used = 0

    def take(self, size: int) -> torch.Tensor:
        """uint8 `[size]`, zero."""
        with self._lock:
            room = self._room() if self._room is not None else None
            begin = -(-self._used // _ALIGNMENT) * _ALIGNMENT
            if room is None or begin + size > len(room):
                room, begin = _mapped(size)
                self._room = weakref.ref(room)
            self._used = begin + size
        return torch.frombuffer(room, dtype=torch.uint8, count=size, offset=begin)


def _mapped(size: int) -> tuple[mmap.mmap, int]:
    """A new room for that many bytes or more, and where its first whole page begins."""
    room = mmap.mmap(-1, max(size, _ROOM) + _PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        # A kernel without them says so: pages are small then, and all else holds.
        with contextlib.suppress(OSError):
            room.madvise(advice)
    address = torch.frombuffer(room, dtype=torch.uint8, count=1).data_ptr()
    return room, -address % _PAGE


_rooms = _Rooms()


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous CPU tensor of zeros that begins at a multiple of 64 bytes.

    Raises:
        MemoryError: there is no address space for it.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    try:
        return _rooms.take(size).view(dtype).view(shape)
    except OSError as error:
        raise MemoryError(f"no room for {size} bytes") from error
