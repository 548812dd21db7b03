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
from collections.abc import Iterator

import torch

from vlm_serve.system.host_memory import release_pages

_PAGE = 2 << 20
_ARENA = 256 << 20
_ALIGNMENT = 64


class _Arenas:
    """Bump allocator of tensors over mapped arenas.

    An arena is unmapped with its last tensor. Pages never written to take no memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arena: weakref.ref[mmap.mmap] | None = None
        self._used = 0

    def begin(self) -> None:
        """Give the next tensor a new arena."""
        with self._lock:
            self._arena = None

    def take(self, size: int) -> torch.Tensor:
        """Allocate uint8 `[size]`, zeroed."""
        with self._lock:
            arena = self._arena() if self._arena is not None else None
            begin = -(-self._used // _ALIGNMENT) * _ALIGNMENT
            if arena is None or begin + size > len(arena):
                arena, begin = _mapped(size)
                self._arena = weakref.ref(arena)
            self._used = begin + size
        return torch.frombuffer(arena, dtype=torch.uint8, count=size, offset=begin)


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


@contextlib.contextmanager
def own_arenas() -> Iterator[None]:
    """Let the block's tensors share no arena with earlier and later ones, so that either kind is
    unmapped while the other lives."""
    _arenas.begin()
    try:
        yield
    finally:
        _arenas.begin()


def release(tensor: torch.Tensor) -> None:
    """Give the pages of a tensor of `zeros` back to the system; it holds zeros then. Parts of pages
    at its ends, which other tensors may share, stay as they are."""
    storage = tensor.untyped_storage()
    release_pages(storage.data_ptr(), storage.nbytes())


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
