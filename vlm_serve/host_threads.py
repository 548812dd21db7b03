"""Gives OpenMP's worker threads back, so that the model's own keep spinning between two ops.

libgomp, the OpenMP of torch's CPU builds, keeps a pool of workers for every thread that ever ran a
parallel op. Once there are more of them than processors, idle or not, it lets waiting workers fall
asleep almost at once, and every parallel op of a decode step then begins with waking one: on two
cores a step of eight sequences took 26 ms instead of 15 (benchmarks/notes/steps-cpu.md). So whoever
computes outside the engine's thread, and the engine's thread itself when it has nothing to do,
gives its workers back; the next parallel op starts new ones.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_SOFT = 1
"""omp_pause_soft: the thread's pool goes, its settings stay."""


def release_worker_threads() -> None:
    """End the OpenMP workers of the calling thread, which must not be inside a parallel op.

    Costs a few microseconds where there are none. Does nothing where OpenMP is not libgomp.
    """
    for pause, host in _pauses():
        pause(_SOFT, host)


def releasing(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to release the worker threads it leaves behind."""

    @functools.wraps(function)
    def released(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        finally:
            release_worker_threads()

    return released


@functools.cache
def _pauses() -> tuple[tuple[Callable[[int, int], int], int], ...]:
    """`omp_pause_resource` and the host's device number, of every libgomp in the process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line}
    found = []
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
            found.append((library.omp_pause_resource, library.omp_get_initial_device()))
        except (OSError, AttributeError):
            continue
    return tuple(found)
