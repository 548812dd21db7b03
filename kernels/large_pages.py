"""Tensors in pages of 2 MB, for long-lived data read again and again: weights and pools.

A processor's TLB holds few pages, and at batch 1 every token reads all weights: in pages of 4 KB
decoding is a tenth to a third slower (measured; see benchmarks/notes/steps-cpu.md). These tensors
also stay out of the heap, which short-lived tensors between them would fragment.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from collections import deque
from typing import NamedTuple

import numpy as np
import torch

_PAGE = 2 << 20
_ARENA = 256 << 20
_ALIGNMENT = 64


class _Place(NamedTuple):
    """Free bytes of an arena, all zero."""

    arena: weakref.ref[mmap.mmap]
    begin: int
    end: int


class _Arenas:
    """Places tensors in mapped arenas, the first place that is large enough.

    The place of a tensor that is gone is taken again: adapters come and go beside the weights. An
    arena is unmapped with its last tensor. Pages never written to take no memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[_Place] = []
        self._left: deque[_Place] = deque()

    def take(self, size: int) -> torch.Tensor:
        """Allocate uint8 `[size]`, zeroed."""
        length = -(-size // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._reclaim()
            arena, begin = self._find(length)
        memory = np.frombuffer(arena, np.uint8, size, begin)
        place = _Place(weakref.ref(arena), begin, begin + length)
        weakref.finalize(memory, self._give_back, place).atexit = False
        return torch.from_numpy(memory)

    def _find(self, length: int) -> tuple[mmap.mmap, int]:
        """Take that many bytes of a free place, or of a new arena."""
        for index, place in enumerate(self._free):
            arena = place.arena()
            if arena is not None and length <= place.end - place.begin:
                self._free[index] = place._replace(begin=place.begin + length)
                return arena, place.begin
        arena, begin = _mapped(length)
        self._free.append(_Place(weakref.ref(arena), begin + length, len(arena)))
        return arena, begin

    def _give_back(self, place: _Place) -> None:
        """Note the place of a tensor that is gone. The garbage collector may call it anywhere, in
        `take` too, so it never waits."""
        self._left.append(place)
        if self._lock.acquire(blocking=False):
            try:
                self._reclaim()
            finally:
                self._lock.release()

    def _reclaim(self) -> None:
        """Empty the places of tensors that are gone, and join free neighbours."""
        if not self._left:
            return
        while self._left:
            place = self._left.popleft()
            arena = place.arena()
            if arena is not None:
                _clear(arena, place.begin, place.end)
                self._free.append(place)
        joined: list[_Place] = []
        for place in sorted(self._free, key=lambda each: (id(each.arena), each.begin)):
            last = joined[-1] if joined else None
            if last is not None and last.arena is place.arena and last.end == place.begin:
                joined[-1] = last._replace(end=place.end)
            elif place.arena() is not None:
                joined.append(place)
        self._free = joined


def _clear(arena: mmap.mmap, begin: int, end: int) -> None:
    """Make bytes zero; whole large pages go back to the kernel."""
    memory = np.frombuffer(arena, np.uint8)
    shift = -memory.ctypes.data % _PAGE
    first = -(-(begin - shift) // _PAGE) * _PAGE + shift
    last = (end - shift) // _PAGE * _PAGE + shift
    if first < last and hasattr(mmap, "MADV_DONTNEED"):
        memory[begin:first], memory[last:end] = 0, 0
        arena.madvise(mmap.MADV_DONTNEED, first, last - first)
    else:
        memory[begin:end] = 0


def _mapped(size: int) -> tuple[mmap.mmap, int]:
    """Map a new arena of at least `size` bytes; return it and its first whole page's offset."""
    arena = mmap.mmap(-1, max(size, _ARENA) + _PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        # A kernel without large pages refuses: pages are then small, and the rest still works.
        with contextlib.suppress(OSError):
            arena.madvise(advice)
    address = torch.frombuffer(arena, dtype=torch.uint8, count=1).data_ptr()
    return arena, -address % _PAGE


_arenas = _Arenas()


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous CPU tensor of zeros, aligned to 64 bytes.

    Raises:
        MemoryError: the address space is exhausted.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    try:
        return _arenas.take(size).view(dtype).view(shape)
    except OSError as error:
        raise MemoryError(f"no address space for {size} bytes") from error
