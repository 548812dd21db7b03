"""What rows cost, from times some of which have been disturbed."""

from __future__ import annotations

import time

import pytest
import torch

from vlm_serve.engine.features.drafts import measuring
from vlm_serve.engine.features.drafts.measuring import ascending, measure_plain, measure_rows, sizes
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheLayout, CacheTensors


def without_pools() -> CacheTensors:
    """Return room for 20 blocks of a model that keeps nothing."""
    return CacheLayout.of([]).allocate(20, 0, 16, {})


def test_sizes_that_are_measured() -> None:
    assert sizes(1) == [1]
    assert sizes(3) == [1, 2, 3]
    assert sizes(16) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert sizes(23) == [1, 2, 3, 4, 6, 8, 12, 16]


def test_less_takes_no_longer_than_more() -> None:
    assert ascending({4: 3.0, 1: 1.0, 2: 9.0}) == [(1, 1.0), (2, 3.0), (4, 3.0)]


def test_what_disturbs_one_round_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first rounds everything takes a hundred times as long, of one size then of another."""
    calls: list[int] = []

    def seconds(size: int, on_cpu: bool) -> float:
        assert on_cpu
        calls.append(size)
        disturbed = len(calls) <= len(sizes(8)) or (size == 4 and calls.count(4) == 2)
        return size * (100.0 if disturbed else 1.0)

    monkeypatch.setattr(measuring, "_seconds", seconds)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    points = measuring._points(8, lambda size: size, on_cpu=True)  # type: ignore[arg-type, return-value]
    assert points == [(size, float(size)) for size in sizes(8)]


def test_what_a_sequence_more_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row takes a second, a state half of one."""

    def step(forward: object, caches: object, rows: int, most_tokens: int) -> float:
        return rows + 0.5 * -(-rows // most_tokens)

    monkeypatch.setattr(measuring, "_step", step)
    monkeypatch.setattr(measuring, "_seconds", lambda run, on_cpu: run)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    for sequences in (2, 8):
        points, sequence = measure_rows(
            lambda batch: ForwardOutput(torch.zeros(1, 4)),
            without_pools(),
            most_sequences=sequences,
            most_tokens=4,
        )
        assert points[:4] == [(1, 1.5), (2, 2.5), (3, 3.5), (4, 4.5)]
        assert points[-1][0] == 4 * sequences
        assert sequence == 0.5


def test_steps_without_drafts_are_those_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ForwardBatch] = []

    def forward(batch: ForwardBatch) -> ForwardOutput:
        seen.append(batch)
        return ForwardOutput(torch.zeros(len(batch.logit_rows), 4))

    points = measure_plain(forward, without_pools(), most_sequences=4)
    assert [count for count, _ in points] == [1, 2, 3, 4]
    largest = max(seen, key=lambda batch: len(batch.token_ids))
    assert largest.decode is not None and largest.prefill is None and largest.verify is None
    assert largest.decode.kv_lens == (1,) * 4 and largest.slots.tolist() == [0, 16, 32, 48]
