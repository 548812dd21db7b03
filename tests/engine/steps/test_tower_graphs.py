"""Pictures embedded from fixed buffers, padded: the same embeddings, whatever else lies there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from kernel_models import kernel_model
from make_checkpoint import make_checkpoint
from model_driver import Driver
from parity_cases import user
from queued_device import QueuedDevice, QueuedExecutor, with_queue
from step_graphs import SPECS, HostFree
from triton_case import row_by_row

from vlm_serve.engine.requests.plan import Encode, StepPlan
from vlm_serve.engine.steps import tower_graphs
from vlm_serve.engine.steps.tower_graphs import TowerGraphs, most_tiles, patch_sizes
from vlm_serve.kernels.dispatch import triton_everywhere
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.kernels.triton_support import Target, interpreted, record_launches
from vlm_serve.models import Model, read_spec
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")

TOWER = replace(SPECS["attention alone"], vision_depth=2, vision_heads=2)
TOWERS = {
    "plain": TOWER,
    "deepstack": replace(TOWER, family="qwen3_vl", num_layers=4, vision_depth=3),
}
SIZES = 32, 96
GRIDS = [(1, 4, 6), (1, 2, 2), (1, 6, 4)]
Grids = list[tuple[int, int, int]]


@pytest.fixture(scope="module", params=TOWERS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    checkpoint: Path = make_checkpoint(tmp_path_factory.mktemp("tower"), TOWERS[request.param])
    with kernel_model(checkpoint) as made, row_by_row():
        yield made


@pytest.fixture(scope="module")
def graphs(model: Model) -> TowerGraphs:
    return TowerGraphs(model, sizes=SIZES, device=QueuedDevice())


def pictures(model: Model, grids: Grids) -> torch.Tensor:
    assert model.spec.vision is not None
    total = sum(height * width for _, height, width in grids)
    draw = torch.Generator().manual_seed(total)
    return torch.randn(total, model.spec.vision.patch_dim, generator=draw)


def embedded(graphs: TowerGraphs, patches: torch.Tensor, grids: Grids) -> list[torch.Tensor]:
    rows, device = graphs.run(patches, grids), graphs._device
    assert rows is not None and isinstance(device, QueuedDevice)
    device.synchronize()
    return [each.clone() for each in rows]


@pytest.mark.parametrize("grids", [GRIDS, GRIDS[:1], [(1, 8, 12)]])
def test_pictures_have_the_embeddings_of_a_run_by_ops(
    model: Model, graphs: TowerGraphs, grids: Grids
) -> None:
    patches = pictures(model, grids)
    got, expected = embedded(graphs, patches, grids), model.encode_media(patches, grids)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


def test_padding_changes_no_bit(model: Model, graphs: TowerGraphs) -> None:
    """Neither what an earlier run left behind the pictures, nor other pictures beside them."""
    patches, first = pictures(model, GRIDS), GRIDS[0][1] * GRIDS[0][2]
    together = embedded(graphs, patches, GRIDS)
    inputs: Any = graphs._tower
    for buffer in (inputs._patches, inputs._positions, inputs._turns[0], inputs._turns[1]):
        buffer.fill_(float("nan"))
    again = embedded(graphs, patches, GRIDS)
    assert all(map(torch.equal, together, again))
    other = torch.cat([patches[:first], 9 * patches[first:].flip(0)])
    beside = embedded(graphs, other, [GRIDS[0], (1, 2, 14)])
    assert torch.equal(beside[0], together[0])
    assert not torch.equal(beside[1][:1], together[1])


@pytest.mark.sweep
def test_embeddings_that_fill_a_graph_outlive_the_next_run(
    model: Model, graphs: TowerGraphs
) -> None:
    """They are all of the results' memory, so that nothing smaller is taken out of it."""
    full, device = (1, 8, 12), graphs._device
    assert full[1] * full[2] == SIZES[-1] and isinstance(device, QueuedDevice)
    executor = QueuedExecutor(
        model, Driver(model).caches, device=device.device, block_size=16, tower_graphs=graphs
    )
    patches = pictures(model, [full])
    for slot, pixels in enumerate((patches, -patches)):
        executor.run(StepPlan((), encodes=(Encode(pixels, full, 2, slot),)))
    for slot, pixels in enumerate((patches, -patches)):
        (expected,) = model.encode_media(pixels, [full])
        embedding = executor.embedding(slot)
        assert embedding is not None
        torch.testing.assert_close(embedding, expected, atol=1e-5, rtol=0)


def test_what_is_not_accepted(model: Model, graphs: TowerGraphs) -> None:
    assert graphs.run(pictures(model, [(1, 8, 14)]), [(1, 8, 14)]) is None
    assert graphs.run(pictures(model, []), []) is None
    few = [(1, 2, 2)] * (most_tiles(SIZES[-1]) + 1)
    assert len(few) * 4 <= SIZES[-1] and graphs.run(pictures(model, few), few) is None
    assert graphs.run(pictures(model, few[1:]), few[1:]) is not None
    own = pictures(model, GRIDS)
    assert graphs.run(own, GRIDS, AdapterChanges({}, 0, tower=True)) is None
    assert graphs.run(own, GRIDS, AdapterChanges({}, 0)) is not None


def test_a_run_asks_nothing_of_the_host(model: Model) -> None:
    tower = model.fixed_tower(SIZES[0])
    assert tower is not None and model.spec.vision is not None
    tiles = torch.zeros(2, 3, dtype=torch.int32)
    with triton_everywhere(), record_launches(Target("cuda", 90)) as launches, HostFree():  # type: ignore[no-untyped-call]
        tower.run(SIZES[0], tiles)
    names = [each.kernel.__name__ for each in launches]
    assert names == ["_halves_kernel", "_segment_kernel"] * model.spec.vision.depth
    assert {each.grid for each in launches} == {(SIZES[0], 2), (2, tower.heads)}


def test_sizes(tmp_path: Path) -> None:
    config = EngineConfig(max_num_batched_tokens=512)
    spec = read_spec(make_checkpoint(tmp_path / "tower", TOWER))
    assert patch_sizes(spec, config) == (256, 512, 1024, 2048)
    assert patch_sizes(spec, replace(config, max_num_batched_tokens=8192))[-1] == 4096
    assert patch_sizes(spec, replace(config, deterministic=True)) == ()
    nine = replace(TOWER, spatial_merge_size=3)
    assert patch_sizes(read_spec(make_checkpoint(tmp_path / "nine", nine)), config)[0] == 252
    text = read_spec(make_checkpoint(tmp_path / "text", replace(TOWER, vision_depth=0)))
    assert patch_sizes(text, config) == ()
    windows = CheckpointSpec(family="minicpmv4_6", vision_depth=3, window_layer=1)
    assert patch_sizes(read_spec(make_checkpoint(tmp_path / "windows", windows)), config) == ()


def test_an_engine_answers_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower_graphs, "PATCHES", (64,))
    counts: Counter[bool] = Counter()
    inner = TowerGraphs.run

    def counting(*args: Any) -> list[torch.Tensor] | None:
        rows = inner(*args)
        counts[rows is not None] += 1
        return rows

    monkeypatch.setattr(TowerGraphs, "run", counting)
    config = EngineConfig(
        dtype="float32",
        block_size=16,
        cache_memory="16MiB",
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=256,
        compiled_kernels=False,
        speculative="off",
    )
    checkpoint = make_checkpoint(tmp_path, TOWER)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)

    def answers() -> list[list[int]]:
        draw = np.random.default_rng(0)
        with Pipeline(checkpoint, config) as pipe:
            outputs = []
            for shape in ((40, 56, 3), (56, 40, 3), (120, 120, 3)):
                noise = draw.integers(0, 256, shape, dtype=np.uint8)
                message = user({"type": "image", "image": noise}, "Why?")
                outputs.append(pipe.chat([message], params))
            pipe.engine.check()
            return [list(one.token_ids) for one in outputs]

    expected = answers()
    assert not counts
    with_queue(monkeypatch, QueuedDevice())
    assert answers() == expected
    # The last picture has too many patches.
    assert counts == {True: 2, False: 1}
