"""A hit equals a cold run: the same tokens always, the same bits when asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_spec import CheckpointSpec
from exactness import next_turn_pairs, picture_pairs, random_pairs
from families import SPECS as FAMILIES
from make_checkpoint import make_checkpoint
from sweeps import quick

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

SPECS = {
    "dense": CheckpointSpec(vision_depth=0),
    "moe": CheckpointSpec(num_experts=8, vision_depth=0),
    "vl moe": FAMILIES["vl moe, every second layer dense"],
    "next": FAMILIES["next, three value heads, dense layers"],
    "qwen3": FAMILIES["qwen3"],
    "lfm2": FAMILIES["lfm2"],
    "lfm2 moe": FAMILIES["lfm2 moe"],
    "granite": FAMILIES["granite h"],
    "nemotron": FAMILIES["nemotron"],
    "qwen3 moe": FAMILIES["qwen3 moe, every second layer dense"],
}


@pytest.fixture(scope="module", params=quick(SPECS, ["dense", "moe"]))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("exactness"), SPECS[request.param])


def _config(deterministic: bool, dtype: str) -> EngineConfig:
    return EngineConfig(
        dtype=dtype, block_size=16, cache_memory="64MiB", deterministic=deterministic
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_hits_have_the_bits_of_a_cold_run(checkpoint: Path, dtype: str) -> None:
    with Pipeline(checkpoint, _config(True, dtype)) as pipe:
        pairs = list(random_pairs(pipe, 50, seed=1))
    assert all(pair.same_bits and pair.same_tokens for pair in pairs)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_kernels_give_hits_the_bits_of_a_cold_run(checkpoint: Path, dtype: str) -> None:
    """Without asking for it: a short rest of a prompt, a long one and a decode step share code."""
    with Pipeline(checkpoint, _config(False, dtype)) as pipe:
        assert pipe.engine.config.compiled_kernels
        pairs = list(random_pairs(pipe, 50, seed=3))
    assert all(pair.same_bits and pair.same_tokens for pair in pairs)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_next_turns_over_decoded_answers_have_the_bits_of_a_cold_run(
    checkpoint: Path, dtype: str
) -> None:
    """What decoding has written is what a prefill would have."""
    config = replace(_config(False, dtype), prefix_cache_decode_state_interval=16)
    with Pipeline(checkpoint, config) as pipe:
        pairs = list(next_turn_pairs(pipe, 50, seed=4))
    assert all(pair.same_bits and pair.same_tokens for pair, _ in pairs)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "int8", "dtype": "float32"},
        {"kv_cache_dtype": "fp8", "state_dtype": "bfloat16", "dtype": "bfloat16"},
    ],
)
def test_rounded_pages_and_states_give_hits_the_bits_of_a_cold_run(
    checkpoint: Path, options: dict[str, Any]
) -> None:
    """Whoever wrote them, a prompt or an answer, has rounded them alike."""
    config = EngineConfig(
        block_size=16, cache_memory="64MiB", prefix_cache_decode_state_interval=16, **options
    )
    with Pipeline(checkpoint, config) as pipe:
        pairs = list(random_pairs(pipe, 25, seed=7))
        pairs += [pair for pair, _ in next_turn_pairs(pipe, 25, seed=8)]
    assert all(pair.same_bits and pair.same_tokens for pair in pairs)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("family", ["dense", "vl"])
def test_hits_behind_pictures_have_the_bits_of_a_cold_run(tmp_path: Path, family: str) -> None:
    """Features of the vision tower included, whoever was encoded beside them."""
    path = make_checkpoint(tmp_path, FAMILIES[family])
    with Pipeline(path, _config(False, "float32")) as pipe:
        pairs = list(picture_pairs(pipe, 25, seed=6))
    assert all(pair.same_bits and pair.same_tokens for pair in pairs)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("quantization", quick(["int8", "int6", "int4"], ["int4"]))
@pytest.mark.parametrize("activations", ["none", "int8"])
@pytest.mark.parametrize("spec", ["dense", "moe"])
def test_hits_in_quantised_models_have_the_bits_of_a_cold_run(
    tmp_path: Path, quantization: str, activations: str, spec: str
) -> None:
    config = replace(
        _config(False, "bfloat16"),
        quantization=quantization,
        quantized_activations=activations,
        prefix_cache_decode_state_interval=16,
    )
    with Pipeline(make_checkpoint(tmp_path, SPECS[spec]), config) as pipe:
        pairs = list(random_pairs(pipe, 20, seed=7))
        pairs += [pair for pair, _ in next_turn_pairs(pipe, 10, seed=8)]
    assert all(pair.same_bits and pair.same_tokens for pair in pairs)


def test_hits_give_the_tokens_of_a_cold_run(checkpoint: Path) -> None:
    with Pipeline(checkpoint, _config(False, "float32")) as pipe:
        pairs = list(random_pairs(pipe, 40, seed=2))
    assert all(pair.same_tokens for pair in pairs)
    assert max(pair.max_difference for pair in pairs) < 1e-4
