"""Answers of a real model to requests that waited for another one's prefill."""

from __future__ import annotations

from pathlib import Path

import pytest
from exactness import joined_pairs
from make_checkpoint import make_checkpoint
from parity import greedy
from parity_cases import random_ids
from together import together

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline


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


def test_a_prompt_that_goes_on_where_another_ends_starts_from_its_last_state(
    checkpoint: Path, config: EngineConfig
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
        with together(pipe.engine, len(prompts)):
            answers = pipe.generate_many(prompts, greedy(8))
        pipe.engine.check()
    assert [answer.token_ids for answer in answers] == cold
    assert [answer.usage.cached_tokens for answer in answers] == [0, 96, 96]
    assert [answer.cache_report.joined_tokens for answer in answers] == [0, 96, 96]
