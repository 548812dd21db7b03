"""Processes that a server has started, and what they hold open.

Processes end and files are closed between listing and looking: what is gone counts as absent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def processes_below(pid: int) -> dict[int, str]:
    """Return the command lines of all descendants."""
    found: dict[int, str] = {}
    layer = [pid]
    while layer:
        children = {child: line for each in layer for child, line in children_of(each).items()}
        found |= children
        layer = list(children)
    return found


def children_of(pid: int) -> dict[int, str]:
    """Return the command lines of the direct children."""
    return {child: line for child in _children(pid) if (line := _command(child)) is not None}


def opened_by(pid: int) -> set[str]:
    """Return the targets of the process's open files, in the form of /proc."""
    found = set()
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(each))
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


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                yield from map(int, path.read_text().split())


def _command(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return None
