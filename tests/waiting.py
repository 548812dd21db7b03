"""Waiting for what happens in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_SECONDS = 120.0
"""A busy machine may take that long; only what never happens does."""


def wait_for(condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Wait until the condition holds; fail if it does not within that many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
