"""Histogram of the time that steps take outside of the model."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
"""Upper bounds of the buckets, in seconds; a last bucket holds longer times."""


class StepTimes:
    """Histogram of each step's host time: planning, sampling, bookkeeping, callbacks and posted
    commands, without the model's own work.

    Attributes:
        counts: steps per bucket, `len(BOUNDS) + 1` of them.
        host_seconds, model_seconds: sums over all steps.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.host_seconds = 0.0
        self.model_seconds = 0.0

    def record(self, seconds: float, model_seconds: float) -> None:
        """Add a step with a total duration of `seconds`."""
        host = seconds - model_seconds
        self.counts[bisect_left(BOUNDS, host)] += 1
        self.host_seconds += host
        self.model_seconds += model_seconds

    def as_dict(self) -> dict[str, float | dict[str, int]]:
        bounds = [*(str(bound) for bound in BOUNDS), "+Inf"]
        return {
            "host_seconds": self.host_seconds,
            "model_seconds": self.model_seconds,
            "host_seconds_counts": dict(zip(bounds, self.counts, strict=True)),
        }
