"""Start processes that never outlive this one, and end those that others have started for it.

The kernel kills a child when its starting thread ends. So one thread, which lives as long as
the process, starts all of them.

Processes of Ray start further ones without asking. As the subreaper this process becomes the parent
of those whose parent has ended, and so it reaches all of them by killing its own children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from vlm_serve.system import child

_PR_SET_CHILD_SUBREAPER = 36
CRASHES = frozenset(
    (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS)
)
"""How a process ends by itself, without memory above all. Others, such as SIGKILL on a host without
memory, come from outside."""


class _Starter:
    """Runs calls in a thread that never ends."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="children", daemon=True).start()

    def call(self, function: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Return the function's result, or raise its exception."""
        done: Future[subprocess.Popen[bytes]] = Future()
        self._calls.put((function, done))
        return done.result()

    def _run(self) -> None:
        while True:
            function, done = self._calls.get()
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)


_starting = threading.Lock()
_starter: _Starter | None = None


def start(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a module of this package; the child is killed when this process ends, however it does.

    Args:
        module: its name.
        arguments: in its `sys.argv`.
        options: of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    global _starter
    with _starting:
        if _starter is None or _starter.pid != os.getpid():  # A fork has no such thread.
            _starter = _Starter()
        starter = _starter
    line = child.command(module, *arguments)
    line.insert(line.index(module), f"{child.BOUND_TO}{os.getpid()}")
    return starter.call(lambda: subprocess.Popen(line, **options))


def how_ended(process: subprocess.Popen[bytes], seconds: float | None = None) -> str:
    """Wait for a process to end and describe its exit. Raise subprocess.TimeoutExpired on
    timeout."""
    status = process.wait(seconds)
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def adopt_orphans() -> None:
    """Become the subreaper: orphaned descendants become children of this process. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(seconds: float) -> None:
    """Kill all descendants of this subreaper, and wait until they are gone or the time is up.

    A killed child's children become this process's own, so a few rounds reach all of them.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _children() -> set[int]:
    """Return the ids of this process's children, those of all its threads."""
    ids: set[int] = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # The thread has ended.
            ids.update(map(int, listing.read_text().split()))
    return ids
