"""Bytes of a run on the device "meta" are those that it holds at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, SPECS
from make_checkpoint import make_checkpoint
from peft_folders import random_factors, write_adapter

from vlm_serve.engine.numerics.arithmetic import Backend, decide
from vlm_serve.engine.start import step_memory
from vlm_serve.engine.start.step_memory import measure_step_memory, peak_of, planned_step_memory
from vlm_serve.engine.steps.adapter_table import SlotSizes, most_bytes
from vlm_serve.engine.steps.memory import StepMemory
from vlm_serve.kernels.norms import rms_norm
from vlm_serve.models import Model, load_model, read_spec
from vlm_serve.models.adapters import place, read_adapter, uniform
from vlm_serve.models.vision_parts import REMEMBERED_PATCHES
from vlm_serve.models.weight_sizes import unread_model
from vlm_serve.options.config import EngineConfig

META = torch.device("meta")
CONFIG = EngineConfig(block_size=16, max_num_seqs=4, max_num_batched_tokens=80, max_model_len=128)


def some(count: int) -> torch.Tensor:
    return torch.empty(count, 64, dtype=torch.float32, device=META)


def test_what_is_freed_is_counted_no_longer() -> None:
    def run() -> None:
        kept = some(100)
        for _ in range(5):
            kept = kept + 1  # the old one is freed when the new one is there
        kept.add_(1)
        kept.view(-1)[:7].mul_(2)

    assert peak_of(run) == 2 * 100 * 64 * 4


def test_what_was_there_before_does_not_count() -> None:
    weight = some(1000)
    assert peak_of(lambda: weight[5:].view(-1)) == 0
    assert peak_of(lambda: weight[5:6] + 1) == 512


def test_what_a_kernel_writes_to_counts_and_what_it_was_given_is_freed() -> None:
    weight = torch.empty(64, device=META)

    def run() -> None:
        x = some(100)
        for _ in range(5):
            x = rms_norm(x, weight, 1e-6)

    assert peak_of(run) == 2 * 100 * 64 * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_weights_takes_what_one_with_them_does(family: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, next(iter(FAMILIES[family].values())))
    spec = read_spec(checkpoint)
    types = decide(CONFIG, spec.dtype, Backend(torch.device("cpu")), None).types
    planned = planned_step_memory(spec, checkpoint, types, CONFIG, with_graphs=True)
    assert planned is not None
    assert bool(planned.vision) == (spec.vision is not None)

    rows = 80  # as many as there are tokens
    model = load_model(checkpoint, types.weights, META, compute_dtype=types.compute)
    unread = unread_model(spec, types.weights, types.compute)
    assert unread.modules == model.modules, "adapters meet the same modules"
    read = measure_step_memory(
        model,
        types,
        CONFIG,
        span_tokens=0,
        logit_rows=rows,
        with_graphs=True,
    )
    assert (planned.forward, planned.graphs) == (read.forward, read.graphs)
    assert planned.forward > rows * spec.vocab_size * 4


def test_steps_with_adapters_take_more_with_weights_and_without(tmp_path: Path) -> None:
    # The tower's graphs have no adapters.
    plain_spec = replace(next(iter(FAMILIES["qwen3_5"].values())), vision_depth=0)
    checkpoint = make_checkpoint(tmp_path, plain_spec)
    spec = read_spec(checkpoint)
    types = decide(CONFIG, spec.dtype, Backend(torch.device("cpu")), None).types
    named = replace(CONFIG, lora_modules=("a=folder",))

    def measured(model: Model, config: EngineConfig) -> StepMemory:
        return measure_step_memory(
            model, types, config, span_tokens=0, logit_rows=4, with_graphs=True
        )

    read = load_model(checkpoint, types.weights, META, compute_dtype=types.compute)
    unread = unread_model(spec, types.weights, types.compute)
    plain, changed = measured(read, CONFIG), measured(read, named)
    assert measured(unread, named) == changed
    assert changed.forward > plain.forward and changed.graphs > 1.5 * plain.graphs
    sizes = [SlotSizes.of_config(each.modules, named).nbytes for each in (read, unread)]
    assert sizes[0] == sizes[1] > 0


def test_adapters_that_come_later_are_counted_at_the_start(tmp_path: Path) -> None:
    # Without a tower, whose graphs have no second set.
    own = replace(next(iter(FAMILIES["qwen3_5"].values())), vision_depth=0)
    checkpoint = make_checkpoint(tmp_path, own)
    spec = read_spec(checkpoint)
    types = decide(CONFIG, spec.dtype, Backend(torch.device("cpu")), None).types

    def planned(**options: Any) -> StepMemory:
        config = replace(CONFIG, max_loras=3, max_lora_rank=8, **options)
        found = planned_step_memory(spec, checkpoint, types, config, with_graphs=True)
        assert found is not None
        return found

    none, later = planned(), planned(reserve_loras=True)
    half = planned(reserve_loras=True, lora_dtype="bfloat16")
    modules = unread_model(spec, types.weights, types.compute).modules
    numbers = sum(out + depth for out, depth in modules.sizes.values())
    assert none.adapters == 0 and later.adapters - half.adapters == 3 * 8 * 2 * numbers
    assert later.adapters - 2 * (later.adapters - half.adapters) == (
        SlotSizes.of(modules, slots=3, max_rank=8).nbytes
    )
    assert later.graphs > 1.5 * none.graphs


def test_steps_and_pictures_count_adapters_of_the_largest_rank(tmp_path: Path) -> None:
    """The adapter that is measured has rank 1, and is measured as the largest one."""
    checkpoint = make_checkpoint(tmp_path, next(iter(FAMILIES["qwen3_5"].values())))
    spec = read_spec(checkpoint)
    types = decide(CONFIG, spec.dtype, Backend(torch.device("cpu")), None).types
    model = unread_model(spec, types.weights, types.compute)
    spans = 60

    def measured(**options: Any) -> StepMemory:
        config = replace(CONFIG, max_lora_rank=64, **options)
        return measure_step_memory(
            model, types, config, span_tokens=spans, logit_rows=4, with_graphs=False
        )

    measured()  # The tower remembers the picture's grid.
    none, later = measured(), measured(reserve_loras=True)
    largest = uniform(model.modules, 64, lambda rows, columns: torch.zeros(rows, columns))
    largest.place(META)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_memory, "idle_adapter", lambda modules, config: largest)
        whole = measured(reserve_loras=True)
    assert none.forward < later.forward == whole.forward
    assert none.vision < later.vision == whole.vision


@pytest.mark.parametrize("family", ["qwen3_5", "minicpmv4_6"])
def test_pictures_of_many_sizes_leave_values_of_a_few(family: str, tmp_path: Path) -> None:
    """What the tower remembers of grids is bounded by patches: a large picture has many."""
    made_as = next(iter(FAMILIES[family].values()))
    spec = read_spec(make_checkpoint(tmp_path, made_as))
    vision = spec.vision
    assert vision is not None
    model = unread_model(spec, torch.bfloat16, torch.bfloat16)
    grids = [(1, 100, 4 * (width + 15)) for width in range(30)]

    def encode(*wanted: tuple[int, int, int]) -> None:
        for grid in wanted:
            pixels = torch.zeros(grid[1] * grid[2], vision.patch_dim)
            model.encode_media(pixels, [grid], [vision.merge_size])

    alone = peak_of(lambda: encode(grids[-1]))
    all_of_them = peak_of(lambda: encode(*grids))
    assert sum(height * width for _, height, width in grids) > 10 * REMEMBERED_PATCHES
    # Positions in 16 bits, and as many cosines and sines as a head has numbers.
    patch = (2 + 4) * made_as.vision_hidden_size
    assert all_of_them <= alone + REMEMBERED_PATCHES * patch


def test_one_later_adapter_of_the_largest_rank_always_fits(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, SPECS["text, moe"])
    spec = read_spec(checkpoint)
    modules = unread_model(spec, torch.float32, torch.float32).modules
    largest = uniform(modules, 64, lambda rows, columns: torch.zeros(rows, columns)).factor_bytes
    for slots in (1, 3, 8):
        config = replace(CONFIG, max_loras=slots, max_lora_rank=64)
        assert slots * most_bytes(modules, config) >= largest
        if slots > 1:
            less = slots * most_bytes(modules, replace(config, max_lora_rank=16))
            assert slots == 3 or slots * most_bytes(modules, config) == less


def test_experts_of_several_ranks_count_as_they_are_placed(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", SPECS["text, moe"])
    spec = read_spec(checkpoint)
    types = decide(CONFIG, spec.dtype, Backend(torch.device("cpu")), None).types
    modules = unread_model(spec, types.weights, types.compute).modules
    assert modules.stacked
    some = [name for name in modules.experts if "layers.0" in name]
    tensors = random_factors({each: modules.experts[each] for each in some[:-3]}, 1, rank=1)
    tensors |= random_factors({each: modules.experts[each] for each in some[-3:]}, 2, rank=16)
    pattern = dict.fromkeys(some[-3:], 16)
    folder = write_adapter(tmp_path / "a", tensors, 1, rank_pattern=pattern)
    placed = place(read_adapter(folder), modules, ("gate_up_proj", "down_proj")).changes
    config = replace(CONFIG, lora_modules=(f"a={folder}",), lora_experts="all", max_loras=2)
    planned = planned_step_memory(spec, checkpoint, types, config, with_graphs=False)
    assert planned is not None and planned.adapters == 2 * placed.factor_bytes
    assert placed.factor_bytes > 2 * read_adapter(folder).nbytes
