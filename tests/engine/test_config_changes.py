"""Engines whose options change config.json: keys of their own, the same hits, and limits that say
how to go beyond them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from exactness import random_pairs
from families import SPECS
from make_checkpoint import make_checkpoint
from parity import greedy
from parity_cases import random_ids
from rank_processes import on_ranks_of, rank_processes

from vlm_serve.commands.plan import make
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
PLAIN: dict[str, Any] = {"dtype": "float32", "block_size": 16, "cache_memory": "16MiB"}


def options(**more: Any) -> EngineConfig:
    return EngineConfig(**PLAIN | more)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("changes"), SPECS["qwen3"])


def test_another_rotation_has_keys_and_answers_of_its_own(checkpoint: Path) -> None:
    prompt, roots, answers = random_ids(120, 1), set(), []
    for rotation in (None, YARN):
        with Pipeline(checkpoint, options(rope_scaling=rotation)) as pipe:
            roots.add(pipe.engine.preprocessor.root_key())
            answers.append(pipe.generate(prompt, greedy(16)).token_ids)
    assert len(roots) == 2
    assert answers[0] != answers[1]


def test_both_options_give_the_same_keys(checkpoint: Path) -> None:
    roots = set()
    for asked in ({"rope_scaling": YARN}, {"hf_overrides": {"rope_scaling": YARN}}):
        with Pipeline(checkpoint, options(**asked)) as pipe:
            roots.add(pipe.engine.preprocessor.root_key())
    assert len(roots) == 1


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["qwen3", "text"])
def test_hits_have_the_bits_of_a_cold_run(tmp_path: Path, name: str) -> None:
    path = make_checkpoint(tmp_path, SPECS[name])
    with Pipeline(path, options(rope_scaling=YARN)) as pipe:
        pairs = list(random_pairs(pipe, 30, seed=5))
    assert all(pair.same_bits and pair.same_tokens for pair in pairs)


def test_ranks_have_the_changes_too(checkpoint: Path) -> None:
    """A rank that read the file alone would rotate its heads otherwise."""
    prompt = random_ids(90, 3)
    with Pipeline(checkpoint, options(rope_scaling=YARN)) as pipe:
        expected = pipe.generate(prompt, greedy(24)).token_ids
    with rank_processes(2) as processes:
        config = options(rope_scaling=YARN, tensor_parallel_size=2, threads=1)
        with on_ranks_of(processes, checkpoint, config) as pipe:
            assert pipe.generate(prompt, greedy(24)).token_ids == expected


def test_the_plan_knows_the_longer_context(checkpoint: Path) -> None:
    wide = YARN | {"original_max_position_embeddings": 32768}
    plan = make(str(checkpoint), options(cache_memory="1GiB", rope_scaling=wide))
    assert plan.model.max_position_embeddings == 4 * 32768


def test_a_context_beyond_the_rotation_names_the_option_that_extends_it(checkpoint: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Pipeline(checkpoint, options(max_model_len=100_000))
    message = caught.value.message
    assert "max_model_len is 100000" in message and "made for 32768 tokens" in message
    start = message.index("--rope-scaling '") + len("--rope-scaling '")
    told = json.loads(message[start : message.index("'", start)])
    assert told == YARN | {"original_max_position_embeddings": 32768}
    plan = make(str(checkpoint), options(rope_scaling=told, max_model_len=100_000))
    assert plan.model.max_position_embeddings == 131_072


def test_a_context_beyond_yarn_names_a_larger_factor(checkpoint: Path) -> None:
    given = YARN | {"original_max_position_embeddings": 16384, "factor": 2.0}
    with pytest.raises(ConfigError, match=r'"factor": 4\.0, .*": 16384'):
        make(str(checkpoint), options(rope_scaling=given, max_model_len=60_000))


@pytest.mark.parametrize("rotation", [None, YARN | {"original_max_position_embeddings": 32768}])
def test_no_factor_beyond_those_of_the_cards_is_advised(
    checkpoint: Path, rotation: dict[str, Any] | None
) -> None:
    with pytest.raises(ConfigError, match="lower it, to at most 131072 with YaRN") as caught:
        make(str(checkpoint), options(rope_scaling=rotation, max_model_len=131_073))
    assert "--rope-scaling" not in caught.value.message


def test_a_change_without_effect_stops_the_start(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="hf_overrides: nonsense has no effect"):
        Pipeline(checkpoint, options(hf_overrides={"nonsense": 1}))
