"""Percentiles of the last minute."""

from __future__ import annotations

from vlm_serve.server.recent import MAX_SAMPLES, Recent


def test_what_is_older_than_a_minute_does_not_count() -> None:
    now = [0.0]
    recent = Recent(lambda: now[0])
    assert recent.percentiles() == {"p50": None, "p99": None, "count": 0}
    for value in (9.0, 8.0):
        recent.add(value)
    now[0] = 50.0
    for value in (3.0, 1.0, 2.0):
        recent.add(value)
    assert recent.percentiles() == {"p50": 3.0, "p99": 9.0, "count": 5}
    now[0] = 61.0
    assert recent.percentiles() == {"p50": 2.0, "p99": 3.0, "count": 3}
    now[0] = 200.0
    assert recent.percentiles()["count"] == 0


def test_samples_are_bounded() -> None:
    recent = Recent(lambda: 0.0)
    for value in range(2 * MAX_SAMPLES):
        recent.add(float(value))
    found = recent.percentiles()
    assert found["count"] == MAX_SAMPLES
    assert found["p50"] is not None and abs(found["p50"] - 1.5 * MAX_SAMPLES) <= 1
