"""What steps take beside weights and pools is measured by running the largest ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from families import FAMILIES
from launch_counts import Operations
from make_checkpoint import make_checkpoint
from parity import executor_of

from vlm_serve.engine.start import step_memory
from vlm_serve.engine.start.sampling_memory import crowd_of
from vlm_serve.engine.start.step_memory import (
    _with_rest,
    largest_span,
    measure_step_memory,
    partial_sums,
    peak_of,
)
from vlm_serve.engine.steps import memory as sizes
from vlm_serve.engine.steps.memory import StepMemory, default_cache_memory
from vlm_serve.engine.steps.pixel_copies import sent_bytes
from vlm_serve.engine.steps.step_sizes import CapturedRows
from vlm_serve.engine.steps.tier_copies import room_bytes
from vlm_serve.engine.steps.tower_graphs import patch_sizes
from vlm_serve.errors import ConfigError
from vlm_serve.kernels.paged_attention import SUMS_BYTES
from vlm_serve.kernels.triton_support import Target, record_launches
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

GPU = torch.device("cuda", 0)
CONFIG = EngineConfig(
    dtype="float32",
    cache_memory="4MiB",
    block_size=16,
    max_num_seqs=4,
    max_num_batched_tokens=80,
    max_model_len=128,
    compiled_kernels=False,
)


class Card:
    """A GPU's allocator for the host's tensors: each run takes 1000 bytes more than the last."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            patch.setattr(torch.cuda, name, lambda *_: None)
        patch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
        patch.setattr(torch.cuda, "max_memory_allocated", self._most)

    def _most(self, device: torch.device) -> int:
        self.runs += 1
        return 1000 * self.runs


@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_step_and_picture_of_every_family_run(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = next(iter(FAMILIES[family].values()))
    checkpoint = make_checkpoint(tmp_path, spec)
    card = Card(monkeypatch)
    with Pipeline(checkpoint, CONFIG) as pipe:
        executor: Any = executor_of(pipe.engine)
        model = executor._model
        spans = largest_span(checkpoint, model.spec, 80)
        found = measure_step_memory(
            model,
            pipe.engine.arithmetic.types,
            pipe.engine.config,
            span_tokens=spans,
            logit_rows=6,
            with_graphs=True,
        )
    assert bool(spans) == bool(spec.vision_depth)
    tower = bool(patch_sizes(model.spec, CONFIG))
    assert card.runs == 3 + bool(spans) + 2 * tower
    kept = CapturedRows.of(CONFIG).result_bytes(model.spec.vocab_size, 0)
    assert kept > 0
    # Block tables of 128 tokens: of four sequences, and of four beside four prompts and no prompt,
    # as they are sent and as they are read.
    kept += 2 * 4 * 8 * (4 + 9)
    # Steps and pictures share 8000 bytes, 4000 of which steps take; 5000 are the tower's own.
    kept += 9000 if tower else 0
    sampling, vision = 1000 * card.runs, model.spec.vision
    media = 0
    if vision is not None and spans:
        media = 3000 + sent_bytes(spans * vision.merge_size**2 * vision.patch_dim)
    assert found == StepMemory(1000, media, 4000 + kept, sampling=sampling)
    assert found.total == max(media, 1000) + 4000 + kept + sampling


def test_what_waits_for_its_copy_to_a_tier_counts(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, CheckpointSpec(vision_depth=0))
    with Pipeline(checkpoint, CONFIG) as pipe:
        model, types = executor_of(pipe.engine)._model, pipe.engine.arithmetic.types
        options = pipe.engine.config
    found = [
        _with_rest(StepMemory(1, 2, 3), model, types, config, with_graphs=False)
        for config in (options, replace(options, host_cache_memory=1 << 20))
    ]
    layout = model.spec.cache_layout()
    largest = max(layout.num_bytes("row", types.pools), layout.num_bytes("block", types.pools, 16))
    assert [each.tiers for each in found] == [0, room_bytes(largest)]
    assert found[1].total == found[0].total + room_bytes(largest)


def test_partial_sums_of_long_contexts_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are at least as many as attention allocates: a maximum, a norm and totals a part."""
    checkpoint = make_checkpoint(tmp_path, CheckpointSpec(vision_depth=0))
    Card(monkeypatch)
    config = replace(CONFIG, max_num_seqs=3, max_model_len=5000)
    with Pipeline(checkpoint, config) as pipe:
        model, options = executor_of(pipe.engine)._model, pipe.engine.config
        sides = [
            measure_step_memory(
                model,
                pipe.engine.arithmetic.types,
                each,
                span_tokens=0,
                logit_rows=6,
                with_graphs=True,
            )
            for each in (replace(options, max_model_len=2048), options)
        ]
    heads, kv_heads, parts, dim = 4, 2, 3, 32
    # Each slice may end in a tile of padding; there is an empty one behind captured prompts.
    rows = heads * CapturedRows.of(options).prompt + kv_heads * 128 * 6
    assert partial_sums(model.spec, replace(options, max_model_len=2048)) == 0
    assert partial_sums(model.spec, options) == rows * parts * (1 + 1 + dim) * 4
    long = replace(options, max_model_len=1 << 20, max_num_batched_tokens=8192)
    assert partial_sums(model.spec, long) == SUMS_BYTES
    one, other = (each.forward - 1000 * turn for turn, each in zip((1, 4), sides, strict=True))
    assert other - one == partial_sums(model.spec, options)


def test_a_picture_larger_than_a_step_counts(tmp_path: Path) -> None:
    from vlm_serve.models import read_spec

    spec = next(iter(FAMILIES["qwen3_5"].values()))
    checkpoint = make_checkpoint(tmp_path, spec)
    model = read_spec(checkpoint)
    whole = spec.image_max_pixels // 16**2  # Patches of 8 x 8 pixels, 2 x 2 of them a token.
    assert largest_span(checkpoint, model, 10) == whole
    assert largest_span(checkpoint, model, whole + 5) == whole + 5


def test_a_step_that_does_not_fit_names_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path, next(iter(FAMILIES["qwen3_5"].values())))
    Card(monkeypatch)

    def full(device: torch.device, run: Callable[[], object]) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(step_memory, "_peak", full)
    with Pipeline(checkpoint, CONFIG) as pipe:
        executor: Any = executor_of(pipe.engine)
        with pytest.raises(ConfigError, match="80 tokens does not fit .* max_num_batched_tokens"):
            measure_step_memory(
                executor._model,
                pipe.engine.arithmetic.types,
                pipe.engine.config,
                span_tokens=0,
                logit_rows=6,
                with_graphs=False,
            )


def test_the_cache_takes_what_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 20_000))
    assert default_cache_memory(GPU, 2) == 8_500
    assert default_cache_memory(GPU, 1, StepMemory(3_000, 2_000, 1_000)) == 5_700
    assert default_cache_memory(GPU, 1, StepMemory(30_000, 0, 0)) == 0
    assert sizes.GPU_SHARE < 1


def test_the_table_names_the_parts() -> None:
    assert str(StepMemory(3 << 30, 1 << 20, 0)) == "text 3 GiB, media 1 MiB"


def test_sampling_of_a_crowd_is_bounded() -> None:
    """Beside the logits, with the counts of penalties; and in few launches."""
    kinds: tuple[dict[str, Any], ...] = (
        {"top_p": 0.8, "top_k": 20, "presence_penalty": 1.5, "logprobs": 20},
        {"top_k": -1, "repetition_penalty": 1.1, "logit_bias": {5: 1.0}, "logprobs": 1},
        {"temperature": 0.0, "frequency_penalty": 1.0},
    )
    params = [SamplingParams(**{"temperature": 0.7, **fields}) for fields in kinds]
    logits = torch.empty(256, 248_320, device="meta")
    step = crowd_of(logits, [params[row % 3] for row in range(256)])
    assert peak_of(step) <= 350 << 20
    with record_launches(Target("cuda", 90)) as launches, Operations() as operations:
        step()
    assert len(launches) + operations.counts.total() <= 6
