"""Processes that a deployment has started."""

from __future__ import annotations

import contextlib
from pathlib import Path


def processes_below(pid: int) -> dict[int, str]:
    """Command lines of all descendants."""
    found: dict[int, str] = {}
    layer = [pid]
    while layer:
        children: list[int] = []
        for each in layer:
            with contextlib.suppress(OSError):
                for path in Path(f"/proc/{each}/task").glob("*/children"):
                    children += map(int, path.read_text().split())
        for child in children:
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ")
                found[child] = line.decode().strip()
        layer = children
    return found


def replica_pids(pid: int) -> list[int]:
    """Return the replicas of the deployment whose gateway is process `pid`."""
    below = processes_below(pid)
    return [each for each, line in below.items() if line.startswith("ray::ServeReplica:")]


def runs(pid: int) -> bool:
    """Return False for an ended process, waited for or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
