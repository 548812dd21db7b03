"""Decode steps with adapters from captured graphs: the set beside the plain one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from make_checkpoint import make_checkpoint
from model_driver import Driver, Sequence_
from parity import executor_of
from peft_folders import random_factors, write_adapter
from queued_device import QueuedDevice, running, with_queue
from step_graphs import SPECS, HostFree, started
from sweeps import quick
from triton_case import kernels, row_by_row

from vlm_serve.engine.features.adapters.options import LoRA
from vlm_serve.engine.features.adapters.waiting import AdapterWaiting
from vlm_serve.engine.steps.adapter_table import AdapterTable, SlotSizes
from vlm_serve.engine.steps.step_buffers import StepBuffers
from vlm_serve.engine.steps.step_graphs import StepGraphs
from vlm_serve.engine.steps.step_sizes import SequenceLimits, StepSize
from vlm_serve.engine.steps.step_tables import HostRing
from vlm_serve.kernels.dispatch import triton_everywhere
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.kernels.linear.low_rank_factors import RECORD
from vlm_serve.kernels.triton_support import Target, interpreted, record_launches
from vlm_serve.models import Model, load_model
from vlm_serve.models.adapters import LowRank, changes_of
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.models.parts import feed_forward
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")

CPU = torch.device("cpu")
SLOTS = 3
Forward = Callable[[ForwardBatch, CacheTensors], ForwardOutput]


@pytest.fixture(scope="module", params=quick(SPECS, ["dense"], pytest.mark.interpreter))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("graphs"), SPECS[request.param])


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[Model]:
    with pytest.MonkeyPatch.context() as monkeypatch, row_by_row():
        as_on_gpu(monkeypatch)
        yield load_model(checkpoint, torch.float32, "cpu")


def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as GPUs hold them: plain, and all experts of a layer in one piece."""
    monkeypatch.setattr(feed_forward, "stacked_experts", lambda device: True)


def adapter(model: Model, seed: int, *, rank: int = 4) -> AdapterChanges:
    """A random adapter of two in three modules, the output's among them."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    named = {}
    for name, (out, depth) in model.modules.sizes.items():
        if draw.random() < 0.67 or name == "lm_head":
            own = rank + draw.randrange(3)
            down = torch.randn(own, depth, generator=generator) / depth**0.5
            named[name] = LowRank(down, torch.randn(out, own, generator=generator), 0.3)
    return changes_of(named, model.modules)


def graphs_over(
    driver: Driver, held: Sequence[AdapterChanges], captured: tuple[int, ...] = (4,)
) -> StepGraphs:
    """Graphs of such sizes; the interpreter takes its time for each."""
    device = QueuedDevice()
    sizes = SlotSizes.of(driver.model.modules, slots=SLOTS, max_rank=8)
    graphs = StepGraphs(
        driver.model,
        driver.caches,
        tuple(map(StepSize, captured)),
        block_size=driver.block_size,
        max_model_len=100,
        device=device,
        deterministic=driver.deterministic,
        adapters=AdapterTable(sizes, device, CPU),
    )
    for slot, each in enumerate(held):
        graphs.hold_changes(slot, each)
    return graphs


def by_kernels(model: Model) -> Forward:
    """A model's forward on the Triton kernels, without graphs."""

    def forward(batch: ForwardBatch, caches: CacheTensors) -> ForwardOutput:
        with kernels():
            return model.forward(batch, caches)

    return forward


def with_adapters(forward: Forward, known: Sequence[AdapterChanges], slots: list[int]) -> Forward:
    """A forward of rows with the adapters of slots, -1 for none."""

    def changed(batch: ForwardBatch, caches: CacheTensors) -> ForwardOutput:
        rows = RowChanges(known, slots) if max(slots) >= 0 else None
        return forward(replace(batch, changes=rows), caches)

    return changed


def decoded(
    driver: Driver,
    forward: Forward,
    known: Sequence[AdapterChanges],
    rows: list[Sequence_],
    slots: list[int],
) -> torch.Tensor:
    """Logits of a decode step, whose tokens are not kept: the pools are as before."""
    before = {name: pool.clone() for name, pool in driver.caches.tensors.items()}
    driver.forward = with_adapters(forward, known, slots)  # type: ignore[assignment]
    logits = driver.step(rows).logits.clone()
    for name, pool in driver.caches.tensors.items():
        pool.copy_(before[name])
    return logits


def test_drafts_of_rows_with_adapters_run_from_graphs(model: Model) -> None:
    """Drafts beside a decode token, and packed logits behind places with padding between them."""
    driver = Driver(model, scratch_rows=1, most_drafts=3)
    rows, known = started(driver, (5, 40, 33)), [adapter(model, seed) for seed in range(2)]
    graphs = verify_graphs_over(driver, known)
    for one, drafts in zip(rows[:2], ([7], [9, 11]), strict=True):
        one.tokens += drafts
    # Tokens of a decode step, then two and three of the sequences with drafts.
    slots = [1, 0, 0, 1, 1, 1]

    def logits(forward: Forward, slots: list[int]) -> torch.Tensor:
        before = {name: pool.clone() for name, pool in driver.caches.tensors.items()}
        driver.forward = with_adapters(forward, known, slots)  # type: ignore[assignment]
        drafts = [(rows[0], 5, 0), (rows[1], 40, 0)]
        found = driver.step(decodes=[rows[2]], drafts=drafts).logits.clone()
        for name, pool in driver.caches.tensors.items():
            pool.copy_(before[name])
        return found

    plain = logits(running(graphs), [-1] * 6)
    for each in (slots, [-1, 0, 0, -1, -1, -1], [0] * 6):
        got, want = logits(running(graphs), each), logits(by_kernels(model), each)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
        for row, slot in enumerate(each):
            assert torch.equal(got[row], plain[row]) == (slot < 0)


def verify_graphs_over(driver: Driver, held: Sequence[AdapterChanges]) -> StepGraphs:
    """Graphs of one size, with room for another token in every place."""
    device = QueuedDevice()
    sizes = SlotSizes.of(driver.model.modules, slots=SLOTS, max_rank=8)
    graphs = StepGraphs(
        driver.model,
        driver.caches,
        (StepSize(2, 2, 4),),
        block_size=driver.block_size,
        max_model_len=100,
        device=device,
        adapters=AdapterTable(sizes, device, CPU),
    )
    for slot, each in enumerate(held):
        graphs.hold_changes(slot, each)
    return graphs


@pytest.mark.parametrize("deterministic", [True, False])
def test_graphs_compute_what_steps_by_ops_do(model: Model, deterministic: bool) -> None:
    driver = Driver(model, scratch_rows=1, deterministic=deterministic)
    rows, known = started(driver, (5, 40, 33, 17)), [adapter(model, seed) for seed in range(2)]
    graphs = running(graphs_over(driver, known))
    for turn, slots in (
        ([3, 1], [1, -1]),
        ([3, 0, 2, 1], [0, 0, -1, 1]),
    ):
        chosen = [rows[one] for one in turn]
        got = decoded(driver, graphs, known, chosen, slots)
        want = decoded(driver, by_kernels(model), known, chosen, slots)
        # Otherwise attention cuts keys into other parts in a graph.
        torch.testing.assert_close(got, want, atol=0 if deterministic else 1e-4, rtol=0)


def test_rows_of_one_graph_do_not_see_each_other(model: Model) -> None:
    driver = Driver(model, scratch_rows=1)
    rows, known = started(driver, (5, 40, 33, 17)), [adapter(model, seed) for seed in range(3)]
    graphs = running(graphs_over(driver, known))
    plain = decoded(driver, graphs, known, rows, [-1] * 4)
    first = decoded(driver, graphs, known, rows, [0, -1, 1, 0])
    second = decoded(driver, graphs, known, rows, [0, 2, 1, -1])
    assert torch.equal(first[1], plain[1]) and torch.equal(second[3], plain[3])
    assert torch.equal(first[0], second[0]) and torch.equal(first[2], second[2])
    for changed, row in ((first, 0), (first, 2), (first, 3), (second, 1)):
        assert not torch.equal(changed[row], plain[row])


def test_slots_are_emptied_and_filled_between_replays(model: Model) -> None:
    driver = Driver(model, scratch_rows=1)
    rows, known = started(driver, (5, 40)), [adapter(model, seed) for seed in range(2)]
    captured = graphs_over(driver, known[:1], (2,))
    graphs = running(captured)

    def run(slots: list[int]) -> torch.Tensor:
        return decoded(driver, graphs, known, rows, slots)

    plain, first = run([-1, -1]), run([0, -1])
    captured.hold_changes(0, None)
    known[0].drop_layout()
    assert torch.equal(run([0, -1]), plain)
    captured.hold_changes(0, known[1])
    other = run([0, -1])
    assert not torch.equal(other[0], first[0]) and torch.equal(other[1], plain[1])
    captured.hold_changes(2, known[0])
    captured.hold_changes(0, known[0])
    assert torch.equal(run([0, -1]), first)
    assert not torch.equal(run([0, 1])[0], plain[0])


def test_a_step_with_adapters_asks_nothing_of_the_host(model: Model) -> None:
    driver, device = Driver(model, scratch_rows=1), QueuedDevice()
    table = AdapterTable(SlotSizes.of(model.modules, slots=2, max_rank=8), device, CPU)
    limits = SequenceLimits(driver.block_size, 4, driver.caches.num_rows - 1)
    for size in (2, 9):
        batch = StepBuffers(StepSize(size), limits, HostRing(device), CPU, adapters=table).batch
        device.synchronize()
        with triton_everywhere(), record_launches(Target("cuda", 90)) as launches:
            model.forward(batch, driver.caches)  # what belongs to the weights is derived once
            with HostFree():  # type: ignore[no-untyped-call]
                model.forward(batch, driver.caches)
        names = {each.kernel.__name__ for each in launches}
        assert "_down_kernel" in names and ("_fixed_kernel" in names) == (size > 8)


def test_sizes_of_slots(model: Model) -> None:
    sizes = SlotSizes.of(model.modules, slots=3, max_rank=8)
    known = adapter(model, 1)
    assert len(sizes.widths) == len(model.modules.sites) + 1
    assert sizes.nbytes == 3 * len(sizes.widths) * RECORD * 8
    table = AdapterTable(sizes, QueuedDevice(), CPU)
    assert table.records.nbytes == sizes.nbytes and not table.records.any()
    for site, change in known.by_site.items():
        assert len(change.down) <= sizes.widths[site]


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_the_engine_answers_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three adapters and two slots: they are loaded, evicted and loaded again. Those of a model
    with experts change these too, and come after the start."""
    checkpoint = make_checkpoint(tmp_path / "model", SPECS[name])
    as_on_gpu(monkeypatch)
    modules = load_model(checkpoint, torch.float32, "cpu").modules
    sizes, later = modules.sizes | modules.experts, name == "moe"
    for number in range(3):
        write_adapter(tmp_path / f"a{number}", random_factors(sizes, number))
    config = EngineConfig(
        dtype="float32",
        block_size=16,
        cache_memory="16MiB",
        max_num_seqs=2,
        max_model_len=64,
        max_loras=2,
        compiled_kernels=False,
        speculative="off",
        lora_modules=()
        if later
        else tuple(f"a{each}={tmp_path / f'a{each}'}" for each in range(3)),
        reserve_loras=later,
        lora_experts="all" if later else "none",
    )
    draw = random.Random(3)
    prompts = [draw.choices(range(400), k=length) for length in (3, 28, 9, 12)]
    lora = ["a0", None, "a1", "a2"]
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)

    def load(pipe: Pipeline) -> None:
        for each in range(3) if later else ():
            pipe.engine.adapters.load(LoRA(f"a{each}", tmp_path / f"a{each}"))

    def answers(pipe: Pipeline, count: int = 4) -> list[list[int]]:
        outputs = pipe.generate_many(prompts[:count], params, lora=lora[:count])
        return [list(one.token_ids) for one in outputs]

    with Pipeline(checkpoint, config) as pipe:
        load(pipe)
        expected = answers(pipe)
    device = QueuedDevice()
    with_queue(monkeypatch, device)
    with Pipeline(checkpoint, config) as pipe:
        load(pipe)
        decoding = executor_of(pipe.engine)._graphs[-1]
        assert decoding._adapters is not None
        replays: list[ForwardBatch] = []
        inner = decoding.run

        def run(batch: ForwardBatch) -> ForwardOutput | None:
            replays.append(batch)
            return inner(batch)

        monkeypatch.setattr(decoding, "run", run)
        assert answers(pipe) == expected
        waiting = pipe.engine._features.get(AdapterWaiting)
        assert waiting is not None
        slots = waiting.slots
        loads = slots.num_loads
        assert answers(pipe, 2) == expected[:2]
        assert slots.num_loads > loads >= 3
        mixed = [each for each in replays if each.changes is not None and decoding._find(each)]
        assert len(mixed) > 6 and device.calls > 8
        assert any(len(set(each.changes.of_rows)) > 1 for each in mixed if each.changes)
        pipe.engine.check()
