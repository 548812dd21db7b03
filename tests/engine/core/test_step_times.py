"""What the engine says of the time its steps take outside of the model."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from make_checkpoint import make_checkpoint
from parity import greedy

from vlm_serve.engine.core.loop import BOUNDS, StepTimes
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline


def test_steps_fall_into_buckets_by_what_the_model_leaves() -> None:
    times = StepTimes()
    times.record(1.0, 0.9998)
    times.record(0.002, 0.0)
    times.record(3.0, 1.0)
    counts = times.as_dict()["host_seconds_counts"]
    assert isinstance(counts, dict)
    assert counts["0.0005"] == 1
    assert counts["0.002"] == 1  # a bound belongs to its bucket
    assert counts["+Inf"] == 1
    assert sum(counts.values()) == 3
    assert len(counts) == len(BOUNDS) + 1
    assert times.host_seconds == pytest.approx(2.0022)
    assert times.model_seconds == pytest.approx(1.9998)


def test_every_step_is_counted_and_waiting_is_not(tmp_path: Path) -> None:
    config = EngineConfig(
        dtype="float32", block_size=16, cache_memory="32MiB", threads=1, speculative="off"
    )
    with Pipeline(make_checkpoint(tmp_path), config) as pipe:
        begin = time.perf_counter()
        pipe.generate([5, 6, 7], greedy(4))
        time.sleep(0.5)
        pipe.generate([5, 6, 8], greedy(4))
        seconds = time.perf_counter() - begin
        stats = pipe.engine.stats()
    times = stats["step_times"]
    assert sum(times["host_seconds_counts"].values()) == stats["num_steps"] == 8
    assert times["model_seconds"] > 0
    assert times["host_seconds"] > 0
    assert times["model_seconds"] + times["host_seconds"] <= seconds - 0.5
