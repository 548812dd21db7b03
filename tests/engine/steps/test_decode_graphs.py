"""Decode steps from fixed buffers, padded: the same answers, and nothing else touched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_models import kernel_model
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence
from parity import executor_of
from queued_device import QueuedDevice, running, with_queue
from step_graphs import (
    SERVED,
    SPECS,
    HostFree,
    Written,
    bits,
    started,
    with_graphs,
)
from sweeps import quick

from vlm_serve.engine.features.drafts.drafting import Drafting
from vlm_serve.engine.start.build import build
from vlm_serve.engine.steps.step_buffers import StepBuffers
from vlm_serve.engine.steps.step_graphs import StepGraphs
from vlm_serve.engine.steps.step_sizes import SequenceLimits, StepSize, decode_sizes
from vlm_serve.engine.steps.step_tables import HostRing, Step, largest_first
from vlm_serve.errors import ConfigError
from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.dispatch import triton_everywhere
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.kernels.metadata import DecodeMeta
from vlm_serve.kernels.triton_support import Target, interpreted, record_launches
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.models.parts import feed_forward
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")

MAX_LEN = 100


@pytest.fixture(scope="module", params=quick(SPECS, ["dense"], pytest.mark.interpreter))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("graphs"), SPECS[request.param])


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[Model]:
    with kernel_model(checkpoint) as made:
        yield made


def graphs_over(driver: Driver, most: int = 4) -> StepGraphs:
    return StepGraphs(
        driver.model,
        driver.caches,
        decode_sizes(most),
        block_size=driver.block_size,
        max_model_len=MAX_LEN,
        device=QueuedDevice(),
    )


def padded_sizes(most: int) -> tuple[int, ...]:
    return tuple(each.decodes for each in decode_sizes(most))


def test_sizes() -> None:
    assert padded_sizes(1) == (1,)
    assert padded_sizes(8) == (1, 2, 4, 8)
    assert padded_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert padded_sizes(256)[-3:] == (240, 248, 256)
    assert padded_sizes(300)[-3:] == (248, 256, 300)
    many = padded_sizes(4096)
    assert many[-5:] == (2048, 2560, 3072, 3584, 4096)
    assert len(many) == len(padded_sizes(256)) + 16 and sorted(set(many)) == list(many)
    # A step of one sequence more than a size has is padded by a fifth of the next one at most.
    assert all(5 * (size - less - 1) < size for less, size in pairwise(many) if less >= 256)


def test_steps_of_all_sizes_share_their_tables(model: Model) -> None:
    """A large step, a small one, then the large one again: each sends all that it reads."""
    lengths = (5, 40, 33, 17)
    plain, padded = Driver(model), Driver(model, scratch_rows=1)
    graphs = graphs_over(padded)
    small, *_, large = (buffers for buffers, _ in graphs._steps)
    tables = [each.batch.token_ids for each in (large, small)]
    assert len(tables[0]) > len(tables[1])
    assert len({each.untyped_storage().data_ptr() for each in tables}) == 1
    ones, others = started(plain, lengths), started(padded, lengths)
    padded.forward = running(graphs)
    for chosen in ((0, 1, 2, 3), (2,), (0, 1, 2, 3)):
        expected = plain.step(decodes=[ones[place] for place in chosen]).logits
        got = padded.step(decodes=[others[place] for place in chosen]).logits
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
        for place in chosen:
            token = int(expected[chosen.index(place)].argmax())
            ones[place].tokens.append(token)
            others[place].tokens.append(token)


def test_a_smaller_step_leaves_padding_behind_it() -> None:
    device = QueuedDevice()
    limits = SequenceLimits(16, 3, scratch_row=9)
    buffers = StepBuffers(StepSize(4), limits, HostRing(device), torch.device("cpu"))

    def step(rows: tuple[int, ...]) -> ForwardBatch:
        count = len(rows)
        return ForwardBatch(
            token_ids=torch.full((count,), 5),
            positions=torch.full((3, count), 20),
            slots=torch.arange(count),
            decode=DecodeMeta(((1, 2, 2, 2),) * count, (21,) * count, rows, rows, rows),
            prefill=None,
            media=(),
            logit_rows=torch.arange(count),
        )

    buffers.fill(step((1, 2, 3, 4)))
    buffers.fill(step((6,)))
    device.synchronize()
    batch = buffers.batch
    assert batch.decode is not None
    tables = {name: table.tolist() for name, table in batch.decode.tensors.items()}
    assert tables == {
        "kv_lens": [21, 1, 1, 1],
        "src_rows": [6, -1, -1, -1],
        "dst_rows": [6, 9, 9, 9],
        "snapshot_rows": [6, -1, -1, -1],
        "block_tables": [[1, 2, 0], *[[1, 0, 0]] * 3],
    }
    assert batch.token_ids.tolist() == [5, 0, 0, 0]
    assert batch.positions.tolist() == [[20, 0, 0, 0]] * 3
    assert batch.slots.tolist() == [0, -1, -1, -1]


def test_padded_steps_equal_plain_ones(model: Model) -> None:
    plain, padded = Driver(model), Driver(model, scratch_rows=1)
    expected, got = started(plain, (5, 40, 33, 17)), started(padded, (5, 40, 33, 17))
    graphs = graphs_over(padded)
    padded.forward = running(graphs)
    # Sequences join, leave and change places.
    for turn in ((0, 1, 2), (2, 1), (3,), (3, 0, 2, 1), (1, 2, 0)):
        want = plain.step([expected[i] for i in turn]).logits
        logits = padded.step([got[i] for i in turn]).logits
        assert logits.shape == want.shape
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=0)
        for row, i in enumerate(turn):
            expected[i].tokens.append(int(want[row].argmax()))
            got[i].tokens.append(int(logits[row].argmax()))
    assert [one.tokens for one in got] == [one.tokens for one in expected]


def test_padding_touches_its_scratch_row_alone(model: Model) -> None:
    driver = Driver(model, scratch_rows=1)
    sequences = started(driver, (5, 40, 33))
    snapshot = driver.take_row()
    graphs = graphs_over(driver)
    scratch = driver.caches.num_rows - 1
    written = Written(driver.caches)

    def run(batch: ForwardBatch, caches: CacheTensors) -> ForwardOutput:
        assert batch.decode is not None
        meta = replace(batch.decode, snapshot_rows=(-1, snapshot, -1))
        return running(graphs)(replace(batch, decode=meta), caches)

    driver.forward = run
    output = driver.step(sequences)
    assert output.logits.isfinite().all()
    if driver.caches.of_unit("block"):
        slots = {driver._slot(one, len(one.tokens) - 1) for one in sequences}
        assert written.slots() == slots
    expected = {*(one.row for one in sequences), snapshot, scratch}
    for pool, rows in zip(driver.caches.of_unit("row"), written.rows(), strict=True):
        assert rows == expected
        assert torch.equal(pool[snapshot], pool[sequences[1].row])


def test_what_is_not_accepted(model: Model) -> None:
    driver = Driver(model, scratch_rows=1)
    seen: list[ForwardBatch] = []
    sequences = started(driver, (5, 6, 7))
    graphs = graphs_over(driver, most=2)

    def keep(batch: ForwardBatch, caches: CacheTensors) -> ForwardOutput:
        seen.append(batch)
        return model.forward(batch, caches)

    driver.forward = keep
    driver.step(sequences[:2])
    driver.step(sequences)
    driver.step(sequences[:1], capture_experts=True)
    driver.step(sequences[:1], [(text_sequence([1, 2]), 0, 2)])
    seen.append(replace(seen[0], logit_rows=torch.arange(1)))
    seen.append(replace(seen[0], media=((0, torch.zeros(1, 64)),)))
    seen.append(replace(seen[0], changes=RowChanges([AdapterChanges({}, 0)], [0])))
    assert [graphs.run(batch) is not None for batch in seen] == [True] + 6 * [False]


def test_bad_rows_and_blocks_are_refused(model: Model) -> None:
    driver = Driver(model, scratch_rows=1)
    graphs = graphs_over(driver)
    one = started(driver, (5,))[0]
    before = bits(driver.caches)
    scratch = driver.caches.num_rows - 1

    def run(**changes: Any) -> None:
        def forward(batch: ForwardBatch, caches: CacheTensors) -> ForwardOutput:
            assert batch.decode is not None
            changed = replace(batch, decode=replace(batch.decode, **changes))
            return running(graphs)(changed, caches)

        driver.forward = forward
        driver.step([one])

    wrong: list[dict[str, Any]] = [{"block_tables": ((64,),)}, {"kv_lens": (17,)}]
    if driver.caches.num_rows:
        wrong.append({"dst_rows": (scratch,)})
    for changes in wrong:
        with pytest.raises(KernelArgumentError):
            run(**changes)
    assert all(map(torch.equal, before, bits(driver.caches)))


def test_a_step_asks_nothing_of_the_host(model: Model) -> None:
    driver = Driver(model, scratch_rows=1)
    limits = SequenceLimits(driver.block_size, 4, driver.caches.num_rows - 1)
    device = QueuedDevice()
    batch = StepBuffers(StepSize(4), limits, HostRing(device), torch.device("cpu")).batch
    device.synchronize()
    assert batch.decode is not None
    with triton_everywhere(), record_launches(Target("cuda", 90)) as launches:
        model.forward(batch, driver.caches)  # what belongs to the weights is derived once
        count = len(launches)
        with HostFree():  # type: ignore[no-untyped-call]
            model.forward(batch, driver.caches)
            assert len(launches) == 2 * count > 0
            with pytest.raises(AssertionError, match="under capture"):
                # Without tables of its own a step has to send them.
                model.forward(
                    replace(batch, decode=replace(batch.decode, tensors={})), driver.caches
                )


@pytest.mark.interpreter
@pytest.mark.parametrize("name", SERVED)
def test_the_engine_answers_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path, SPECS[name])
    config = EngineConfig(
        dtype="float32",
        block_size=16,
        cache_memory="16MiB",
        max_num_seqs=3,
        max_model_len=128,
        prefix_cache_decode_state_interval=16,
        compiled_kernels=False,
    )
    # The Triton kernels do not read the experts' packed weights of the CPU path.
    monkeypatch.setattr(feed_forward, "stacked_experts", lambda device: True)
    draw = random.Random(3)
    prompts = [draw.choices(range(400), k=length) for length in (3, 28, 47, 30)]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with Pipeline(checkpoint, config) as pipe:
        assert not pipe.engine.config.cuda_graphs
        rows = executor_of(pipe.engine)._caches.num_rows
        expected = [one.token_ids for one in pipe.generate_many(prompts, params)]
    device = QueuedDevice()
    with_queue(monkeypatch, device)
    with Pipeline(checkpoint, config) as pipe:
        assert pipe.engine.config.cuda_graphs
        assert executor_of(pipe.engine)._caches.num_rows == (rows + 1 if rows else 0)
        assert [one.token_ids for one in pipe.generate_many(prompts, params)] == expected
        assert device.calls > 12
        pipe.engine.check()


def test_a_capture_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(device: torch.device) -> object:
        raise RuntimeError("driver too old")

    checkpoint = str(make_checkpoint(tmp_path, SPECS["dense"]))
    with_graphs(monkeypatch, fail)
    config = EngineConfig(dtype="float32", block_size=16, cache_memory="16MiB")
    parts = build(checkpoint, config)
    assert parts.config.cuda_graphs is False
    assert parts.degraded == "steps run without CUDA graphs: a step could not be captured"
    assert "steps run without CUDA graphs: driver too old" in caplog.text
    with pytest.raises(ConfigError, match="cuda_graphs: driver too old"):
        build(checkpoint, replace(config, cuda_graphs=True))


@pytest.mark.parametrize(
    ("size", "named"),
    [
        (StepSize(8), "a step of 8 decode tokens"),
        (StepSize(0, 2, 4), "a step of 2 times 4 tokens"),
        (StepSize(7, 2, 4), "a step of 7 decode tokens and 2 times 4 tokens"),
        (StepSize(3, prompts=2, tokens=64), "a step of 3 decode tokens and 64 prompt tokens"),
    ],
)
def test_a_capture_that_fails_is_named(size: StepSize, named: str) -> None:
    def capture(size: StepSize) -> None:
        raise torch.OutOfMemoryError("out of memory\nfree 1 GiB")

    with pytest.raises(RuntimeError) as found:
        largest_first((size,), capture)
    assert str(found.value) == f"{named}: out of memory"


def test_a_step_that_cannot_be_captured_is_named_to_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(QueuedDevice):
        def capture(self, step: Step) -> Step:
            raise torch.OutOfMemoryError("out of memory")

        def warm_up(self, step: Step) -> None:
            pass

    monkeypatch.setattr(StepGraphs, "_tile_forms", lambda *size: ())
    with_graphs(monkeypatch, lambda place: Full())
    checkpoint = str(make_checkpoint(tmp_path, SPECS["dense"]))
    config = EngineConfig(dtype="float32", block_size=16, cache_memory="16MiB", max_num_seqs=2)
    step, lost = "a step of 2 decode tokens and 32 prompt tokens", "steps run without CUDA graphs"
    assert build(checkpoint, config).degraded == f"{lost}: {step} could not be captured"
    assert f"{lost}: {step}: out of memory" in caplog.text
    named = f"cuda_graphs: {step}: out of memory"
    with pytest.raises(ConfigError, match=named):
        build(checkpoint, replace(config, cuda_graphs=True))


def test_graphs_need_a_gpu(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, SPECS["dense"])
    with pytest.raises(ConfigError, match="cuda_graphs needs a GPU"):
        build(str(checkpoint), EngineConfig(device="cpu", cuda_graphs=True))


def test_drafts_weigh_steps_from_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(tmp_path, SPECS["dense"])
    with_queue(monkeypatch, QueuedDevice())
    config = EngineConfig(
        dtype="float32",
        block_size=16,
        cache_memory="16MiB",
        max_num_seqs=2,
        max_model_len=64,
        compiled_kernels=False,
        speculative="suffix",
        speculative_tokens=2,
    )
    with Pipeline(checkpoint, config) as pipe:
        drafting = pipe.engine._features.get(Drafting)
        assert drafting is not None and drafting.costs.has_graphs
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        assert len(pipe.generate([5, 6, 7] * 6, params).token_ids) == 6
        pipe.engine.check()
