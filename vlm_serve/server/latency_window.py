"""Percentiles of latencies over the last minute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 60.0
MAX_SAMPLES = 4096
"""Beyond this the oldest samples are dropped."""


class LatencyWindow:
    """Samples of the last minute.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)

    def add(self, value: float) -> None:
        """Add a sample."""
        self._samples.append((self._clock(), value))

    def percentiles(self) -> dict[str, float | int | None]:
        """Return median, 99th percentile and number of the samples; None without samples."""
        oldest = self._clock() - WINDOW_SECONDS
        while self._samples and self._samples[0][0] < oldest:
            self._samples.popleft()
        values = sorted(value for _, value in self._samples)
        if not values:
            return {"p50": None, "p99": None, "count": 0}
        last = len(values) - 1
        return {
            "p50": values[round(last * 0.5)],
            "p99": values[round(last * 0.99)],
            "count": len(values),
        }
