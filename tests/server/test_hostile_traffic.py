"""Three hundred random hostile requests, eight at a time, beside sixteen ordinary clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_cases import MAX_BODY_BYTES, as_json, make_case
from hostile_traffic import came_back, describe, measure, memory_bound
from server_process import server_process

CASES = 300
SERVE = (
    *("demo", "--cache-memory", "64MiB", "--threads", "1", "--max-num-seqs", "16"),
    *("--max-body-size", "16MiB", "--max-request-memory", "256MiB"),
)


def test_a_case_is_made_from_its_seed_alone() -> None:
    assert [make_case(seed) for seed in range(40)] == [make_case(seed) for seed in range(40)]


def test_cases_are_bounded() -> None:
    """4017 would be one of 20 GB."""
    assert len(make_case(4017).body) <= MAX_BODY_BYTES


def test_what_a_body_repeats_is_encoded_once() -> None:
    """Deep values two hundred thousand times took ten minutes, while other clients had left."""

    class Counted(list[Any]):
        times = 0

        def __iter__(self) -> Iterator[Any]:
            self.times += 1
            return super().__iter__()

    inner = Counted([1, {"a": ["x", None, 0.5, 'y"']}, [], {}, True])
    body = {"messages": [{"content": [inner] * 200}], "k": [[], "", inner, inner]}
    plain = json.dumps(body).encode()
    inner.times = 0
    assert as_json(body) == plain
    assert inner.times == 2
    assert len(as_json([["x" * 1000]] * 100_000)) == MAX_BODY_BYTES


@pytest.mark.fuzz
def test_hostile_requests_harm_nobody(tmp_path: Path) -> None:
    """Times are not compared here, where other tests run beside; benchmarks/hostile.py does."""
    log = tmp_path / "log"
    with log.open("w") as file, server_process(*SERVE, log=file) as server:
        result = asyncio.run(measure(server, first=0, count=CASES, quiet_seconds=2))
        bound = memory_bound(server)
    assert [describe(outcome) for outcome in result.outcomes if outcome.wrong] == []
    assert len(result.outcomes) == CASES
    assert result.hostile.wrong == []
    assert "Traceback" not in log.read_text()
    assert bound > 0
    assert result.hostile.most_memory <= result.before.resident + bound
    assert came_back(result.before, result.after)
