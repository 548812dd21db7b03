"""Requests that begin in one step, however fast or busy the machine is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vlm_serve.engine.engine import Engine

_PATIENCE_SECONDS = 120.0


@contextmanager
def together(engine: Engine, count: int) -> Iterator[None]:
    """Within it the engine makes no step until so many requests have been submitted. Else the first
    ones run alone for as long as the others take to come, and who shares a step, is preempted or
    evicted with whom depends on that. Of a list of prompts, no more are open at a time than twice
    the seats."""
    submit, come = engine.submit, threading.Semaphore(0)
    count = min(count, 2 * engine.config.max_num_seqs)

    def counting(*arguments: Any, **options: Any) -> str:
        name = submit(*arguments, **options)
        come.release()
        return name

    def wait() -> None:
        for _ in range(count):
            assert come.acquire(timeout=_PATIENCE_SECONDS), "fewer have been submitted"

    engine.submit = counting  # type: ignore[method-assign]
    engine._loop.post(wait)
    try:
        yield
    finally:
        engine.submit = submit  # type: ignore[method-assign]
