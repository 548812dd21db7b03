"""What captured steps compute at most, and what their results take."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint

from vlm_serve.engine.numerics.arithmetic import Backend, decide
from vlm_serve.engine.steps import step_paths
from vlm_serve.engine.steps.step_sizes import CapturedRows
from vlm_serve.engine.steps.step_tables import Step, StepTables
from vlm_serve.models import load_model, read_spec
from vlm_serve.options.config import EngineConfig


def test_sizes_follow_the_options() -> None:
    plain = CapturedRows.of(EngineConfig(max_num_seqs=40, max_num_batched_tokens=600))
    assert plain == CapturedRows(sequences=40, prompt=768, prompt_logits=44)
    assert plain.most_logits == 44
    options = EngineConfig(max_num_seqs=8, speculative="mtp", speculative_tokens=3)
    drafting = CapturedRows.of(options)
    # Places of four tokens, beside seven sequences that decode.
    assert (drafting.drafts, drafting.draft_rows, drafting.passes) == (8, 39, 8)
    assert drafting.most_logits == 39


def test_kinds_of_steps_share_their_results() -> None:
    plain = CapturedRows(sequences=2, prompt=64, prompt_logits=3)
    assert plain.result_bytes(100, 8) == 4 * 100 * 3
    drafting = CapturedRows(2, 64, 3, drafts=2, draft_rows=8, passes=2)
    # Passes have logits and hidden states of their own, and the states that they begin with.
    assert drafting.result_bytes(100, 8) == 4 * 100 * (8 + 2) + 8 * (67 + 2 + 8)


def test_decode_steps_reach_as_far_as_sequences_may_run() -> None:
    many = CapturedRows.of(EngineConfig(max_num_seqs=3000, max_num_batched_tokens=4096))
    assert many.sequences == many.most_logits == many.most_tokens == 3000
    # Beside prompts there are 256 at most.
    assert many.prompt_logits == 260
    assert many.table_bytes(32, sets=2) - many.table_bytes(32) == 2 * 4 * 32 * 3000


class Still:
    """Captures nothing, and runs no step."""

    def __init__(self, device: torch.device) -> None:
        pass

    def warm_up(self, step: Step) -> None:
        pass

    def capture(self, step: Step) -> Step:
        return step

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        pass

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Step:
        return lambda: None


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(("most", "drafts"), [(1, 3), (8, 5), (64, 2)])
def test_tables_of_all_steps_are_counted(
    most: int, drafts: int, adapters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of steps has one piece of memory for the tables of all its sizes."""
    checkpoint = make_checkpoint(tmp_path, CheckpointSpec(vision_depth=0, mtp=True))
    spec = read_spec(checkpoint)
    config = EngineConfig(
        block_size=16,
        max_num_seqs=most,
        max_num_batched_tokens=512,
        speculative="mtp",
        speculative_tokens=drafts,
        reserve_loras=adapters,
    )
    made: list[weakref.ref[StepTables]] = []
    allocate = StepTables.__init__

    def counted(self: StepTables, *args: Any) -> None:
        allocate(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(StepTables, "__init__", counted)
    monkeypatch.setattr(step_paths, "CudaGraphs", Still)
    types = decide(config, spec.dtype, Backend(torch.device("cpu")), None).types
    model = load_model(checkpoint, types.weights, "meta", compute_dtype=types.compute, drafts=True)
    caches = spec.cache_layout(1, mtp=True).allocate(
        4, 1, 16, types.pools, torch.device("cpu"), num_updates=1
    )
    length = 65536
    graphs = step_paths._capture(model, caches, config, length)
    assert len(graphs.steps) == 3 and graphs.drafts is not None
    kept = [each for ref in made if (each := ref()) is not None]
    storages = [each.fixed["tokens"]["slots"].untyped_storage() for each in kept]
    taken = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
    counted_bytes = CapturedRows.of(config).table_bytes(length // 16, sets=1 + adapters)
    # Tables of tokens are small beside those of the blocks of long sequences.
    assert len(kept) > 9 and counted_bytes < taken < counted_bytes + 300_000
