"""Answers of a real model to requests that waited for another one's prefill."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from exactness import joined_pairs
from make_checkpoint import make_checkpoint
from parity import greedy
from parity_cases import random_ids

from vlm_serve.config import EngineConfig
from vlm_serve.engine.engine import Engine
from vlm_serve.pipeline import Pipeline


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("joined"))


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return EngineConfig(dtype="float32", block_size=16, cache_memory="64MiB")


@pytest.mark.usefixtures("compiler")
def test_hits_that_were_waited_for_have_the_bits_of_a_cold_run(
    checkpoint: Path, config: EngineConfig
) -> None:
    with Pipeline(checkpoint, config) as pipe:
        pairs = list(joined_pairs(pipe, 10, seed=3))
    assert all(pair.same_bits and pair.same_tokens for pair in pairs)


@contextmanager
def planned_together(engine: Engine, count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hold the engine's thread until `count` requests are submitted: its next plan sees them all,
    however slowly they come."""
    held, here, submit = threading.Event(), threading.Semaphore(0), engine.submit

    def hold() -> None:
        held.set()
        for _ in range(count):
            assert here.acquire(timeout=60)

    def submit_and_count(*args: Any, **options: Any) -> str:
        request_id = submit(*args, **options)
        here.release()
        return request_id

    holder = threading.Thread(target=engine.call, args=(hold,))
    holder.start()
    assert held.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "submit", submit_and_count)
        yield
    holder.join()


def test_a_prompt_that_goes_on_where_another_ends_starts_from_its_last_state(
    checkpoint: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meeting cut is the leader's very end, where it samples."""
    short = random_ids(96, 1)
    prompts = [short, [*short, *random_ids(20, 2)], [*short, *random_ids(50, 3)]]
    with Pipeline(checkpoint, config) as pipe:
        cold = []
        for prompt in prompts:
            pipe.engine.flush()
            cold.append(pipe.generate(prompt, greedy(8)).token_ids)
        pipe.engine.flush()
        with planned_together(pipe.engine, len(prompts), monkeypatch):
            answers = pipe.generate_many(prompts, greedy(8))
        pipe.engine.check()
    assert [answer.token_ids for answer in answers] == cold
    assert [answer.usage.cached_tokens for answer in answers] == [0, 96, 96]
    assert [answer.cache_report.joined_tokens for answer in answers] == [0, 96, 96]
