"""The short workloads of benchmarks/hit_rate.py, on a small random model."""

from __future__ import annotations

from pathlib import Path

from make_checkpoint import make_checkpoint

from benchmarks.hit_rate import Meter
from vlm_serve import EngineConfig, Pipeline


def test_what_is_cached_is_compared_with_what_could_be(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", dtype="float32", block_size=64, cache_memory="512MiB")
    with Pipeline(make_checkpoint(tmp_path), config) as pipe:
        meter = Meter(pipe)
        meter.run([*range(100, 400)])
        meter.run([*range(100, 400), 7])
        assert meter.possible == [0, 256] and meter.attention == meter.possible
        assert 0 < meter.cached[1] <= 256
