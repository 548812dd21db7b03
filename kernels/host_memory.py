"""Keeps the memory of freed tensors in the process, for CPU inference.

glibc hands every block over 32 MB straight back to the kernel when it is freed and maps fresh pages
for the next one. A prefill of 4 096 tokens makes several such tensors per layer, and touching fresh
pages takes longer than the work on them: 41 ms instead of 2 ms for a tensor of 50 MB (measured; see
benchmarks/notes/steps-cpu.md).
"""

from __future__ import annotations

import ctypes

# Parameter numbers of mallopt(3) and the advice of madvise(2).
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
_ARENA_MAX = -8
_NEVER = -1
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20

_reserve = 0
"""By which the heap grows at once; 0: nothing was asked of it."""


def retain_freed_memory(reserve: int = 4 << 30) -> bool:
    """Tell the C library to serve large tensors from its heap and to keep what is freed.

    For the whole process, from now on; what is mapped already stays as it is. Call it before the
    thread that runs the model starts: threads started later share one heap, since a thread's own
    heap cannot hold blocks over 64 MB. The process then stays at the peak of its memory, but for
    what `release_freed_memory` gives back. Calling it again costs nothing.

    Args:
        reserve: bytes of address space (not memory) by which the heap grows at once, so that they
            can be backed by 2 MB pages where the kernel offers them. A fragmented heap then costs
            few page faults too.

    Returns:
        Whether freed memory is retained; False where the C library is not glibc.
    """
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_ARENA_MAX, 1))
    if any(mallopt(name, value) != 1 for name, value in settings):
        return False
    global _reserve
    _reserve = reserve
    _advise(libc)
    return True


def _advise(libc: ctypes.CDLL) -> None:
    """Lets the heap grow by the reserve, in large pages where the kernel has them."""
    malloc, free, madvise = libc.malloc, libc.free, libc.madvise
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    free.argtypes = [ctypes.c_void_p]
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = malloc(_reserve)
    if block is not None:
        first = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        # Advice only: where it is refused, pages are small and all else holds.
        madvise(first, max(0, block + _reserve - first), _MADV_HUGEPAGE)
        free(block)


def release_freed_memory(*, regrow: bool = False) -> bool:
    """Give pages on which nothing lives back to the kernel, wherever in the heap they are.

    Args:
        regrow: a heap that is kept grows by its reserve again, with the advice that went with its
            end. Not while others wait: the kernel may have to move much to find a large page.

    Returns:
        Whether there was a way to: False where the C library is not glibc. Takes milliseconds.
    """
    libc = ctypes.CDLL(None)
    trim = getattr(libc, "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    if regrow and _reserve:
        _advise(libc)
    return True
