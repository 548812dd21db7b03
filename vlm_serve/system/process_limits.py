"""Limits of the shell (`ulimit`) that are too small to serve: a sentence before anything fails."""

from __future__ import annotations

import resource

from vlm_serve.errors import ConfigError

LEAST_ADDRESS_SPACE = 1280 << 20
"""Address space without which torch and the compiled kernels cannot be loaded, in bytes. With torch
2.13 for CPUs the demo model did not start in 900 000 KiB, and did in 1 500 000."""
LEAST_FILES = 64
"""Open files: libraries and files of a model, pipes of helpers, and the first connections."""


def check_process_limits() -> None:
    """Raise ConfigError if a limit of this process is too small for an engine."""
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY and space < LEAST_ADDRESS_SPACE:
        raise ConfigError(
            f"the limit of address space (ulimit -v) is {space >> 10} KiB, but an engine takes at "
            f"least {LEAST_ADDRESS_SPACE >> 10} KiB besides its model"
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # The soft limit is raised to it.
    if files != resource.RLIM_INFINITY and files < LEAST_FILES:
        raise ConfigError(
            f"the limit of open files (ulimit -n) is {files}, but an engine takes at least "
            f"{LEAST_FILES}"
        )


def memory_sentence(error: MemoryError) -> str:
    """Return what to tell about memory that ran out, and the limit of the shell."""
    reason = f": {error}" if str(error) else ""
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space == resource.RLIM_INFINITY:
        return f"memory ran out{reason}"
    limit = f"the limit of address space (ulimit -v) is {space >> 10} KiB"
    return f"memory ran out{reason}; {limit}"


def free_address_space() -> int | None:
    """Return the bytes left for this process to map; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return limit
    return max(0, limit - used)
