"""Measure the machine's limits beside the code compared with them (`limits.cpp`)."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = (
    *("-O3", "-march=native", "-shared", "-fPIC", "-pthread"),
    # Left alone, GCC takes half of AVX-512's registers.
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)
STEPS = 20_000_000
"""Multiply-adds of a chain: of fewer, a third of the time went into a second thread's way to a
processor of its own."""


class Limits:
    """Multiply-adds in registers, and plain reads of a buffer in large pages that no cache holds.

    Args:
        threads: of either.
        most_bytes: size of the buffer.
    """

    def __init__(self, threads: int, most_bytes: int) -> None:
        # Commits that a child measures (`kernels_before.py`) need not have it.
        from vlm_serve.kernels.large_pages import zeros

        self._library, self._threads = _build(), threads
        self._unit = 512 * threads
        size = -(-most_bytes // self._unit) * self._unit + 64
        self._buffer = zeros(size, dtype=torch.uint8).fill_(1)
        self._results = torch.zeros(threads, dtype=torch.int64)
        # Vectors lie at multiples of their size.
        self._start = -(-self._buffer.data_ptr() // 64) * 64

    def multiply_add(self) -> float:
        """Runs some; how many floating-point operations they were."""
        steps, results = ctypes.c_int64(STEPS), ctypes.c_void_p(self._results.data_ptr())
        self._library.multiply_add(steps, self._count(), ctypes.c_float(0.5), results)
        return float(2 * STEPS * self._library.floats_per_step() * self._threads)

    def byte_dots(self) -> float:
        """Runs some; how many operations on whole numbers they were, 0 where it knows none."""
        steps, results = ctypes.c_int64(STEPS), ctypes.c_void_p(self._results.data_ptr())
        return float(STEPS * self._library.byte_dots(steps, self._count(), results) * self._threads)

    def read(self, size: int) -> int:
        """Reads about `size` bytes; how many they were."""
        size = min(max(1, size // self._unit) * self._unit, self._buffer.numel() - 64)
        results = ctypes.c_void_p(self._results.data_ptr())
        start = ctypes.c_void_p(self._start)
        self._library.read(start, ctypes.c_int64(size), self._count(), results)
        return size

    def _count(self) -> ctypes.c_int64:
        return ctypes.c_int64(self._threads)


def _build() -> ctypes.CDLL:
    """Compiled anew each time, for this processor or the one that is emulated (by CXX)."""
    with tempfile.TemporaryDirectory() as folder:
        target = str(Path(folder) / "limits.so")
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", target], check=True)
        library = ctypes.CDLL(target)
    library.floats_per_step.restype = library.byte_dots.restype = ctypes.c_int64
    return library
