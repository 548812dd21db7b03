"""Engines over two ranks: one long-lived process beside this one serves them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoint_spec import CheckpointSpec
from exactness import next_turn_pairs, picture_pairs, random_pairs
from families import FAMILIES
from invariance import compared
from make_checkpoint import make_checkpoint
from parity import greedy
from parity_cases import CONVERSATIONS, conversations, random_ids, user
from rank_processes import on_ranks_of, rank_processes
from sweeps import quick

from vlm_serve.commands.plan import make
from vlm_serve.engine.steps.ranks.process import RankProcesses
from vlm_serve.models import read_spec
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

SPECS = {
    "dense": CheckpointSpec(),
    "moe": CheckpointSpec(num_experts=8),
    "vl": CheckpointSpec(family="qwen3_vl", vision_depth=3),
    "next": CheckpointSpec(family="qwen3_next", vision_depth=0, num_experts=8),
    "qwen3": CheckpointSpec(family="qwen3", vision_depth=0, num_experts=8),
}
CONFIG = EngineConfig(
    dtype="float32", block_size=16, cache_memory="16MiB", tensor_parallel_size=2, threads=1
)


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with rank_processes(2) as started:
        yield started


@pytest.fixture(scope="module", params=quick(SPECS, 1))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ranks"), SPECS[request.param])


def _answers(pipe: Pipeline, media: bool) -> list[object]:
    """Greedy and drawn answers, with a hit, several choices and probabilities among them."""
    prompts = [random_ids(150, 1), random_ids(150, 1)[:130] + random_ids(40, 2), random_ids(9, 3)]
    found: list[object] = [each.token_ids for each in pipe.generate_many(prompts, greedy(64))]
    drawn = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=2, logprobs=2)
    found.append([choice.token_ids for choice in pipe.generate(prompts[0], drawn).choices])
    chats = list(conversations(media=media).values())
    return found + [each.token_ids for each in pipe.chat_many(chats, greedy(64))]


@pytest.mark.always
def test_answers_are_those_of_one_rank(processes: RankProcesses, checkpoint: Path) -> None:
    media = read_spec(checkpoint).vision is not None
    with Pipeline(checkpoint, replace(CONFIG, tensor_parallel_size=1)) as alone:
        expected = _answers(alone, media)
    with on_ranks_of(processes, checkpoint, CONFIG) as pipe:
        assert _answers(pipe, media) == expected


@pytest.mark.parametrize("kind", quick(FAMILIES, ["qwen3_vl"]))
def test_every_family_answers_as_on_one_rank(
    processes: RankProcesses, tmp_path: Path, kind: str
) -> None:
    path = make_checkpoint(tmp_path, next(iter(FAMILIES[kind].values())))
    chats = list(conversations(media=read_spec(path).vision is not None).values())[:4]
    found: list[list[list[int]]] = []
    for config in (replace(CONFIG, tensor_parallel_size=1), CONFIG):
        opened = Pipeline(path, config) if not found else on_ranks_of(processes, path, config)
        with opened as pipe:
            found.append([each.token_ids for each in pipe.chat_many(chats, greedy(64))])
    assert found[0] == found[1]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("quantization", quick(["int8", "int6", "int4"], 1))
def test_quantised_weights_are_shared_out_too(processes: RankProcesses, quantization: str) -> None:
    config = replace(CONFIG, dtype="auto", quantization=quantization)
    config = replace(config, prefix_cache_decode_state_interval=16)
    with on_ranks_of(processes, "demo", config) as pipe:
        turns = next_turn_pairs(pipe, 5, seed=2)
        pairs = [*random_pairs(pipe, 10, seed=1), *(pair for pair, _ in turns)]
        half = pipe.engine.weights.projections
        assert pipe.engine.weights == make("demo", config).weights
    assert all(pair.same_bits and pair.same_tokens for pair in pairs)
    alone = make("demo", replace(config, tensor_parallel_size=1)).weights.projections
    assert half < alone  # the vision tower is whole on each


@pytest.mark.usefixtures("compiler")
def test_hits_have_the_bits_of_a_cold_run(processes: RankProcesses, checkpoint: Path) -> None:
    config = replace(CONFIG, prefix_cache_decode_state_interval=16)
    with on_ranks_of(processes, checkpoint, config) as pipe:
        turns = next_turn_pairs(pipe, 20, seed=2)
        pairs = [*random_pairs(pipe, 30, seed=1), *(pair for pair, _ in turns)]
        if pipe.engine.spec.vision is not None:
            pairs += picture_pairs(pipe, 10, seed=3)
    assert all(pair.same_bits and pair.same_tokens for pair in pairs)


def test_tiers_hold_the_parts_of_all_ranks(
    processes: RankProcesses, checkpoint: Path, tmp_path: Path
) -> None:
    config = replace(CONFIG, cache_memory="1MiB", prefix_cache_state_budget=3, max_num_seqs=3)
    config = replace(config, disk_cache_path=str(tmp_path))
    prompt = random_ids(210, 4)
    with on_ranks_of(processes, checkpoint, config) as pipe:
        cold = pipe.generate(prompt, greedy(8))
    with on_ranks_of(processes, checkpoint, config) as pipe:
        warm = pipe.generate(prompt, greedy(8))
        assert warm.usage.cached_tokens >= 192
        assert warm.token_ids == cold.token_ids
    with Pipeline(checkpoint, replace(config, tensor_parallel_size=1)) as alone:
        assert alone.generate(prompt, greedy(8)).usage.cached_tokens == 0


def test_media_that_a_tier_knows_are_encoded_on_no_rank(
    processes: RankProcesses, checkpoint: Path, tmp_path: Path
) -> None:
    if read_spec(checkpoint).vision is None:
        pytest.skip("a model without a vision tower has no embeddings")
    config = replace(CONFIG, disk_cache_path=str(tmp_path), max_model_len=4096)
    chats = [CONVERSATIONS["everything"], [user("First:"), *CONVERSATIONS["everything"][1:]]]
    with on_ranks_of(processes, checkpoint, replace(config, disk_cache_path=None)) as pipe:
        cold = [pipe.chat(chat, greedy(8)).token_ids for chat in chats]
    with on_ranks_of(processes, checkpoint, config) as pipe:
        pipe.chat(chats[0], greedy(1))
    with on_ranks_of(processes, checkpoint, config) as pipe:
        assert [pipe.chat(chat, greedy(8)).token_ids for chat in chats] == cold
        stats = pipe.engine.stats()
        assert stats["num_decoded_media"] == stats["num_encoded_spans"] == 0
        assert stats["embeddings"]["disk"] > 0
    with Pipeline(checkpoint, replace(config, tensor_parallel_size=1)) as alone:
        alone.chat(chats[0], greedy(1))
        assert "disk" not in alone.engine.stats()["embeddings"]


def test_drafts_change_nothing(processes: RankProcesses, checkpoint: Path) -> None:
    prompt = random_ids(40, 6) * 3
    with on_ranks_of(processes, checkpoint, CONFIG) as pipe:
        expected = pipe.generate(prompt, greedy(48)).token_ids
    with on_ranks_of(processes, checkpoint, replace(CONFIG, speculative="suffix")) as pipe:
        again = [pipe.generate(prompt, greedy(48)).token_ids for _ in range(2)]
        assert again == [expected] * 2


def test_memory_is_what_the_plan_says(processes: RankProcesses, checkpoint: Path) -> None:
    plan = make(str(checkpoint), CONFIG)
    with on_ranks_of(processes, checkpoint, CONFIG) as pipe:
        assert pipe.engine.memory == plan.memory
        assert pipe.engine.weights == plan.weights


@pytest.mark.usefixtures("compiler")
def test_ranks_are_batch_invariant(processes: RankProcesses, checkpoint: Path) -> None:
    start = partial(on_ranks_of, processes, checkpoint)
    how: dict[str, Any] = {"seed": 4, "longest": 80, "answer": 6, "ways": {"as it is": {}}}
    for result in compared(start, CONFIG, 6, **how):
        assert result.equal == result.total > 0, result


def test_without_compiled_kernels_ranks_meet_in_a_process_group(checkpoint: Path) -> None:
    config = replace(CONFIG, compiled_kernels=False, deterministic=True)
    prompt = random_ids(60, 7)
    with Pipeline(checkpoint, replace(config, tensor_parallel_size=1)) as alone:
        expected = alone.generate(prompt, greedy(16)).token_ids
    with Pipeline(checkpoint, config) as pipe:
        assert pipe.generate(prompt, greedy(16)).token_ids == expected
        hit = pipe.generate(prompt, greedy(16))
        assert hit.usage.cached_tokens and hit.token_ids == expected


@pytest.mark.parametrize("name", quick(["demo", "demo-moe"], 1))
def test_four_ranks_repeat_the_two_heads_of_keys_and_values(name: str) -> None:
    config = replace(CONFIG, tensor_parallel_size=4, prefix_cache_decode_state_interval=16)
    prompt = random_ids(200, 8)
    with Pipeline(name, replace(config, tensor_parallel_size=1)) as alone:
        expected = alone.generate(prompt, greedy(64)).token_ids
    with rank_processes(4) as three, on_ranks_of(three, name, config) as pipe:
        assert pipe.generate(prompt, greedy(64)).token_ids == expected
        turns = next_turn_pairs(pipe, 3, seed=9)
        pairs = [*random_pairs(pipe, 5, seed=8), *(pair for pair, _ in turns)]
        assert all(pair.same_bits and pair.same_tokens for pair in pairs)
        assert pipe.engine.memory.block_bytes * 2 == alone.engine.memory.block_bytes
