"""Awaiting blocking work that must not go on behind its caller's back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def settled(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work on other threads; if cancelled, wait for its end first.

    A thread cannot be cancelled. It may still use files that its cancelled caller would close.
    """
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # retrieved, so that asyncio does not report it
        raise


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking work on a thread; see `settled`."""
    return await settled(asyncio.to_thread(work))
