"""Work behind the requests of clients who wait for their answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

BEHIND = 1 << 33
"""Added to the priority of work in the background: more than requests can differ by."""

_offset: ContextVar[int] = ContextVar("priority_offset", default=0)


@contextmanager
def in_background() -> Iterator[None]:
    """Run the requests that are made inside the block behind all others."""
    token = _offset.set(BEHIND)
    try:
        yield
    finally:
        _offset.reset(token)


def effective_priority(priority: int) -> int:
    """Return the engine's priority for a request's own; lower values run first."""
    return priority + _offset.get()
