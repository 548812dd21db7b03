"""Work that may never end, since a disk may hang: the process does not wait for it at exit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


async def in_daemon_thread(name: str, work: Callable[[], _T]) -> _T:
    """Run `work` in a daemon thread and return its result. Cancelling the caller does not stop the
    work."""
    done: Future[_T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)
