"""Release of OpenMP worker threads, so that the model's own keep spinning between two ops.

libgomp, the OpenMP of torch's CPU builds, keeps a pool of workers for every thread that ever ran a
parallel op. Once there are more workers than processors, idle or not, libgomp lets waiting workers
sleep almost at once. Every parallel op of a decode step then starts with a wake-up: on two cores a
step of eight sequences took 26 ms instead of 15 (benchmarks/notes/steps-cpu.md). So threads other
than the engine's release their workers after computing, and the engine's thread does when it is
idle. The next parallel op starts new ones.
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
"""omp_pause_soft: release the thread's pool, keep its settings."""


def release_worker_threads() -> None:
    """End the OpenMP workers of the calling thread, which must not be inside a parallel op.

    Takes a few microseconds if there are none. Does nothing if OpenMP is not libgomp.
    """
    for pause, host in _pauses():
        pause(_SOFT, host)


def releasing(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it releases its OpenMP workers when it returns."""

    @functools.wraps(function)
    def released(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        finally:
            release_worker_threads()

    return released


@functools.cache
def _pauses() -> tuple[tuple[Callable[[int, int], int], int], ...]:
    """Return `omp_pause_resource` and the host's device number of every libgomp in the process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line}
    pauses = []
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
            pauses.append((library.omp_pause_resource, library.omp_get_initial_device()))
        except (OSError, AttributeError):
            continue
    return tuple(pauses)
