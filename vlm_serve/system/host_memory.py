"""Retention of freed memory in the process, for CPU inference.

When a block over 32 MB is freed, glibc returns it to the kernel at once and maps fresh pages for
the next one. A prefill of 4 096 tokens makes several such tensors per layer. Touching fresh pages
takes longer than the work on them: 41 ms instead of 2 ms for a tensor of 50 MB (measured; see
benchmarks/notes/steps-cpu.md).
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from pathlib import Path

# Parameter numbers of mallopt(3) and the advice of madvise(2).
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
_ARENA_MAX = -8
_NEVER = -1
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20

_reserve = 0
"""Bytes by which the heap grows at once; 0: `retain_freed_memory` was not called."""


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library, always the same: each object has classes of its own."""
    return ctypes.CDLL(None)


def retain_freed_memory(reserve: int = 4 << 30) -> bool:
    """Tell the C library to serve large tensors from its heap and to keep freed memory.

    The setting is for the whole process from now on; existing mappings stay as they are. Call it
    before the thread that runs the model starts: threads started later share one heap, since a
    thread's own heap cannot hold blocks over 64 MB. The process then stays at its peak memory,
    minus whatever `release_freed_memory` returns. Calling it again costs nothing.

    Args:
        reserve: bytes of address space (not memory) by which the heap grows at once, so that they
            can be backed by 2 MB pages where the kernel offers them. A fragmented heap then costs
            few page faults too.

    Returns:
        True if freed memory is retained; False where the C library is not glibc.
    """
    try:
        libc = _libc()
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
    """Grow the heap by the reserve, in large pages where the kernel has them."""
    malloc, free, madvise = libc.malloc, libc.free, libc.madvise
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    free.argtypes = [ctypes.c_void_p]
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = malloc(_reserve)
    if block is not None:
        first = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        # Only a hint: if it is refused, pages are small and the rest still works.
        madvise(first, max(0, block + _reserve - first), _MADV_HUGEPAGE)
        free(block)


def release_freed_memory(*, regrow: bool = False) -> bool:
    """Return unused heap pages to the kernel, wherever in the heap they are. Takes milliseconds.

    Args:
        regrow: let a retained heap grow by its reserve again, since trimming drops the page advice
            for its end. Not while requests wait: the kernel may have to move much memory to find
            a large page.

    Returns:
        True if pages could be returned; False where the C library is not glibc.
    """
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    if regrow and _reserve:
        _advise(_libc())
    return True


def release_pages(address: int, size: int) -> None:
    """Return the whole pages among so many bytes of private memory to the kernel. They are zero
    when they are read next.

    Raises OSError if the kernel refuses.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if length > 0 and madvise(first, length, _MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), "memory cannot be given back")


class _Info(ctypes.Structure):
    """The result of mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def _mallinfo() -> _Info | None:
    """Return what glibc says of all its heaps; None: another C library, or an old one."""
    ask = getattr(_libc(), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _Info
    info: _Info = ask()
    return info


def allocated_bytes() -> int:
    """Return the bytes that this process has of its C library; 0: it cannot be asked."""
    info = _mallinfo()
    return 0 if info is None else int(info.uordblks + info.hblkhd)


def resident_bytes(pid: int | None = None) -> int | None:
    """Return the memory that has pages of a process, None: of this one; None: the system does not
    say."""
    try:
        return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return None


def free_bytes() -> int | None:
    """Return how much of the C library's free memory still has pages; None: it cannot be asked.

    mallinfo2 counts free memory whose pages are with the kernel again, or never were there: a
    trimmed heap, and the reserve. So the pages of the heap are counted. Memory that is allocated
    and untouched has none either, which makes the result too small by as much.
    """
    info = _mallinfo()
    if info is None:
        return None
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    heaps = [line.split()[0].split("-") for line in lines if line.endswith("[heap]")]
    pages = sum(_num_pages(int(begin, 16), int(end, 16)) for begin, end in heaps)
    return max(0, min(int(info.fordblks), pages * mmap.PAGESIZE - int(info.uordblks)))


def _num_pages(begin: int, end: int) -> int:
    """Return how many pages between two addresses are in memory; 0: they are no longer mapped."""
    seen = bytearray((end - begin) // mmap.PAGESIZE)
    mincore, first = _libc().mincore, ctypes.c_ubyte.from_buffer(seen)
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return seen.count(1) if mincore(begin, end - begin, ctypes.byref(first)) == 0 else 0
