"""What requests may ask for, on two ranks as on one: small pools, grammars, logprobs, experts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from parity import greedy
from parity_cases import random_ids
from rank_processes import on_ranks_of, rank_processes
from together import together

from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.steps.ranks.process import RankProcesses
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output, Pipeline
from vlm_serve.structured_outputs import StructuredOutputs

CONFIG = EngineConfig(
    dtype="float32",
    block_size=16,
    cache_memory="192KiB",  # of each rank: two sequences of three hundred tokens
    max_num_seqs=3,
    prefix_cache_state_budget=3,
    tensor_parallel_size=2,
    threads=1,
    speculative="off",  # drafts may have one end before another needs its room
)


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with rank_processes(2) as started:
        yield started


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = CheckpointSpec(num_experts=8, vision_depth=0)
    return make_checkpoint(tmp_path_factory.mktemp("requests"), spec)


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Iterator[Pipeline]:
    config = replace(CONFIG, tensor_parallel_size=1, cache_memory="384KiB")
    with Pipeline(checkpoint, config) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def shared(processes: RankProcesses, checkpoint: Path) -> Iterator[Pipeline]:
    with on_ranks_of(processes, checkpoint, CONFIG) as pipe:
        yield pipe


def _tokens(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_answers_survive_preemption(alone: Pipeline, shared: Pipeline) -> None:
    """More than the pool holds, so that sequences give up their blocks and begin again."""
    prompts = [random_ids(200, seed) for seed in range(6)]
    expected = _tokens(alone.generate_many(prompts, greedy(100)))
    with together(shared.engine, len(prompts)):
        assert _tokens(shared.generate_many(prompts, greedy(100))) == expected
    assert shared.engine.stats()["num_preemptions"]
    shared.engine.check()


def test_probabilities_of_prompts_and_answers(alone: Pipeline, shared: Pipeline) -> None:
    params = greedy(6, logprobs=3, prompt_logprobs=2)
    for _ in range(2):  # cold, then from what is kept
        first, other = (pipe.generate(random_ids(80, 23), params) for pipe in (alone, shared))
        assert first.logprobs is not None and other.logprobs is not None
        assert first.prompt_logprobs is not None and other.prompt_logprobs is not None
        rows = zip(first.prompt_logprobs, other.prompt_logprobs, strict=True)
        pairs = [(a.logprobs, b.logprobs) for a, b in rows if a is not None and b is not None]
        pairs += zip(first.logprobs, other.logprobs, strict=True)
        assert len(pairs) == 79 + 6
        for own, their in pairs:
            assert own.keys() == their.keys()
            assert all(abs(own[token] - their[token]) < 1e-4 for token in own)


def test_routed_experts_are_those_of_one_rank(alone: Pipeline, shared: Pipeline) -> None:
    params = greedy(6, return_routed_experts=True)
    for _ in range(2):
        first, other = (pipe.generate(random_ids(70, 24), params) for pipe in (alone, shared))
        assert first.routed_experts is not None and other.routed_experts is not None
        assert np.array_equal(first.routed_experts, other.routed_experts)


def test_grammars_and_penalties(alone: Pipeline, shared: Pipeline) -> None:
    form = StructuredOutputs(regex="(yes|no)( or (yes|no)){2}")
    for params in (
        greedy(40, structured_outputs=form),
        greedy(30, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 4.0}),
    ):
        first, other = (pipe.generate(random_ids(30, 25), params) for pipe in (alone, shared))
        assert first.token_ids == other.token_ids


def test_who_leaves_in_the_middle_leaves_nothing(shared: Pipeline) -> None:
    prompt = shared.engine.preprocessor.prepare_tokens(random_ids(60, 26))
    begun, ended = threading.Event(), threading.Event()

    def listen(delta: Delta) -> None:
        begun.set()
        if delta.finish_reason is not None:
            ended.set()

    name = shared.engine.submit(prompt, greedy(500), listen)
    assert begun.wait(30)
    shared.engine.abort(name)
    assert ended.wait(30)
    shared.engine.check()
