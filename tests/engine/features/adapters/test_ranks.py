"""Adapters in an engine over two ranks: one process beside this one has its share of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from families import SPECS
from make_checkpoint import make_checkpoint
from parity_cases import random_ids
from peft_folders import random_adapter
from rank_processes import on_ranks_of, rank_processes

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output, Pipeline
from vlm_serve.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
NAMES = [None, "a", "b", "c", "a", None]


def test_answers_are_those_of_one_rank(tmp_path: Path) -> None:
    """Also with more adapters than slots. Each answer has the bits that it has alone, and a hit
    those of a cold run."""
    path = make_checkpoint(tmp_path / "model", SPECS["dense"])
    folders = {name: random_adapter(path, tmp_path / name, seed) for seed, name in enumerate("abc")}
    config = EngineConfig(
        dtype="float32",
        block_size=16,
        cache_memory="16MiB",
        threads=1,
        max_loras=2,
        speculative="off",
        lora_modules=tuple(f"{name}={folder}" for name, folder in folders.items()),
    )
    prompts = [random_ids(60, each) for each in range(len(NAMES))]

    def alone(pipe: Pipeline, index: int) -> Output:
        return pipe.generate(prompts[index], PARAMS, lora=NAMES[index])

    with Pipeline(path, config) as pipe:
        expected = [alone(pipe, index).token_ids for index in range(len(NAMES))]
    with (
        rank_processes(2) as processes,
        on_ranks_of(processes, path, replace(config, tensor_parallel_size=2)) as pipe,
    ):
        cold = [alone(pipe, index) for index in range(len(NAMES))]
        hits = [alone(pipe, index) for index in range(len(NAMES))]
        pipe.engine.flush()
        together = pipe.generate_many(prompts, PARAMS, lora=NAMES)
    assert [each.token_ids for each in cold] == expected
    for own, hit, mixed in zip(cold, hits, together, strict=True):
        assert hit.usage.cached_tokens and hit.logprobs == own.logprobs
        assert mixed.logprobs == own.logprobs
