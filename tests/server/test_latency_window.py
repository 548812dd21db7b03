"""Percentiles of the last minute."""

from __future__ import annotations

from vlm_serve.server.state import MAX_SAMPLES, LatencyWindow


def test_what_is_older_than_a_minute_does_not_count() -> None:
    now = [0.0]
    window = LatencyWindow(lambda: now[0])
    assert window.percentiles() == {"p50": None, "p99": None, "count": 0}
    for value in (9.0, 8.0):
        window.add(value)
    now[0] = 50.0
    for value in (3.0, 1.0, 2.0):
        window.add(value)
    assert window.percentiles() == {"p50": 3.0, "p99": 9.0, "count": 5}
    now[0] = 61.0
    assert window.percentiles() == {"p50": 2.0, "p99": 3.0, "count": 3}
    now[0] = 200.0
    assert window.percentiles()["count"] == 0


def test_samples_are_bounded() -> None:
    window = LatencyWindow(lambda: 0.0)
    for value in range(2 * MAX_SAMPLES):
        window.add(float(value))
    found = window.percentiles()
    assert found["count"] == MAX_SAMPLES
    assert found["p50"] is not None and abs(found["p50"] - 1.5 * MAX_SAMPLES) <= 1
