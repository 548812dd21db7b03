"""Steps with short prefills from fixed buffers, padded: the same answers, nothing else touched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_models import kernel_model
from make_checkpoint import make_checkpoint
from model_driver import Driver, Sequence_, text_sequence
from parity_cases import random_ids
from queued_device import QueuedDevice, running
from step_graphs import SPECS, HostFree, Written, bits, started
from sweeps import quick

from vlm_serve.engine.steps.step_buffers import StepBuffers
from vlm_serve.engine.steps.step_graphs import StepGraphs
from vlm_serve.engine.steps.step_sizes import SequenceLimits, StepSize
from vlm_serve.engine.steps.step_tables import HostRing
from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.dispatch import triton_everywhere
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.kernels.metadata import PrefillMeta
from vlm_serve.kernels.triton_support import Target, interpreted, record_launches
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")


@pytest.fixture(scope="module", params=quick(SPECS, ["dense"], pytest.mark.interpreter))
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    checkpoint: Path = make_checkpoint(tmp_path_factory.mktemp("graphs"), SPECS[request.param])
    with kernel_model(checkpoint) as made:
        yield made


def graphs_over(driver: Driver, tokens: tuple[int, ...] = (48,)) -> StepGraphs:
    """Graphs of few sizes: every size is computed by the interpreter once."""
    return StepGraphs(
        driver.model,
        driver.caches,
        [StepSize(3, prompts=2, tokens=each) for each in tokens],
        block_size=driver.block_size,
        max_model_len=100,
        device=QueuedDevice(),
    )


def played(driver: Driver) -> list[torch.Tensor]:
    """Prompts that come in pieces, some of them beside sequences that decode, with states kept on
    the way: the logits of every step, then the states that were kept."""
    a, b, c = (text_sequence(random_ids(length, length), cuts=(7, 20)) for length in (40, 21, 33))
    kept = [driver.take_row() for _ in range(3)]
    steps: list[dict[str, Any]] = [
        {"prefills": [(a, 0, 20)], "snapshots": [(a, 16, kept[0])]},
        {"prefills": [(a, 20, 40), (b, 0, 21)]},
        {"decodes": [a], "prefills": [(c, 0, 1)]},
        {"decodes": [b, a], "prefills": [(c, 1, 33)], "snapshots": [(c, 20, kept[1])]},
        {"decodes": [a, b, c], "prefills": [(text_sequence(random_ids(9, 1)), 0, 9)]},
    ]
    logits = []
    for step in steps:
        for one in step.get("decodes", ()):
            one.tokens.append(7 + len(one.tokens))
        logits.append(driver.step(all_logits=False, **step).logits.clone())
    rows = [row for one in (a, b, c) for row in (one.row,)] + kept[:2]
    states = [pool[row].clone() for row in rows for pool in driver.caches.of_unit("row")]
    return logits + states


def test_padded_steps_equal_plain_ones(model: Model) -> None:
    plain, padded = Driver(model), Driver(model, scratch_rows=1)
    padded.forward = running(graphs_over(padded, (24, 48)))
    for got, expected in zip(played(padded), played(plain), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_padding_touches_its_scratch_row_alone(model: Model) -> None:
    driver = Driver(model, scratch_rows=1)
    (one,) = started(driver, (40,))
    graphs = graphs_over(driver)
    other = text_sequence(random_ids(11, 3))
    driver.forward = running(graphs)
    scratch, written = driver.caches.num_rows - 1, Written(driver.caches)
    assert driver.step([one], [(other, 0, 11)], all_logits=False).logits.isfinite().all()
    if driver.caches.of_unit("block"):
        slots = {driver._slot(other, i) for i in range(11)}
        assert written.slots() == slots | {driver._slot(one, len(one.tokens) - 1)}
    assert all(rows == {one.row, other.row, scratch} for rows in written.rows())


def step_batch(driver: Driver, *args: Any, **kwargs: Any) -> ForwardBatch:
    """What a step would give the model, without computing it."""
    seen: list[ForwardBatch] = []

    def keep(batch: ForwardBatch, caches: CacheTensors) -> ForwardOutput:
        seen.append(batch)
        return ForwardOutput(torch.empty(0))

    driver.forward = keep
    driver.step(*args, **kwargs)
    return seen[0]


def prompt(length: int) -> tuple[Sequence_, int, int]:
    return text_sequence(random_ids(length, length)), 0, length


def test_what_is_not_accepted(model: Model) -> None:
    driver = Driver(model, scratch_rows=1)
    sequences = started(driver, (5, 6, 7, 8))
    graphs = graphs_over(driver)
    last = {"all_logits": False}
    good = step_batch(driver, sequences[:3], [prompt(30), prompt(18)], **last)
    assert graphs.run(good) is not None
    refused = [
        step_batch(driver, (), [prompt(49)], **last),
        step_batch(driver, (), [prompt(3), prompt(4), prompt(5)], **last),
        step_batch(driver, sequences, [prompt(4)], **last),
        step_batch(driver, sequences[:1], **last),
        step_batch(driver, (), [prompt(9)]),
        replace(good, media=((0, torch.zeros(1, 64)),)),
        replace(good, capture_experts=True),
        replace(good, changes=RowChanges([AdapterChanges({}, 0)], [0] * len(good.token_ids))),
        replace(good, deterministic=True),
    ]
    assert all(graphs.run(each) is None for each in refused)


def test_bad_rows_and_blocks_are_refused(model: Model) -> None:
    driver = Driver(model, scratch_rows=1)
    graphs = graphs_over(driver)
    batch = step_batch(driver, (), [prompt(9)], all_logits=False)
    before = bits(driver.caches)
    assert batch.prefill is not None
    bad: list[dict[str, Any]] = [{"block_tables": ((64,),)}]
    if driver.caches.num_rows:
        bad.append({"dst_rows": (driver.caches.num_rows - 1,)})
    for changes in bad:
        wrong = replace(batch, prefill=replace(batch.prefill, **changes, checked=set()))
        with pytest.raises(KernelArgumentError):
            graphs.run(wrong)
    assert all(map(torch.equal, before, bits(driver.caches)))


def test_a_step_asks_nothing_of_the_host(model: Model) -> None:
    driver = Driver(model, scratch_rows=1)
    device, limits = QueuedDevice(), SequenceLimits(driver.block_size, 7, 16)
    sizes, ring = StepSize(3, prompts=2, tokens=32), HostRing(device)
    batch = StepBuffers(sizes, limits, ring, torch.device("cpu")).batch
    device.synchronize()
    with triton_everywhere(), record_launches(Target("cuda", 90)) as launches:
        model.forward(batch, driver.caches)  # attention adds its tables
        count = len(launches)
        with HostFree():  # type: ignore[no-untyped-call]
            model.forward(batch, driver.caches)
        assert len(launches) == 2 * count > 0


def test_tables_behind_a_step_are_padding() -> None:
    sizes, limits = StepSize(1, prompts=2, tokens=64), SequenceLimits(16, 3, scratch_row=9)
    device = QueuedDevice()
    buffers = StepBuffers(sizes, limits, HostRing(device), torch.device("cpu"))
    assert buffers.batch.prefill is not None
    meta = PrefillMeta((0, 20), (4,), ((5, 2),), (3,), (6,), ((12, 20),), ((0, 0, 8),))
    batch = ForwardBatch(
        token_ids=torch.arange(20),
        positions=torch.arange(20).expand(3, -1),
        slots=torch.arange(20) + 84,
        decode=None,
        prefill=meta,
        media=(),
        logit_rows=torch.tensor([19]),
    )
    assert buffers.accepts(batch)
    buffers.fill(batch)
    device.synchronize()
    tables = {name: table.tolist() for name, table in buffers.batch.prefill.tensors.items()}
    assert tables == {
        "cu_seqlens": [0, 20, 20, 20],
        "starts": [4, 0, 0],
        "src_rows": [3, -1, -1],
        "dst_rows": [6, 9, 9],
        "chunk_bounds": [0, 12, *[20] * 6],
        "chunk_sequence": [0] * 7,
        "chunk_snapshot": [8, *[-1] * 6],
        "first_chunk": [0, 2, 2, 2],
        "tail_stop": [12, 20, 0, 0, 0, 0],
        "tail_row": [8, 6, 9, 9, 9, 9],
        "first_tail": [0, 2, 2, 2],
        "block_tables": [[5, 2, 0], [0, 0, 0], [0, 0, 0]],
    }
    assert buffers.batch.token_ids.tolist() == [0, *range(20), *[0] * 44]
    assert buffers.batch.slots.tolist() == [-1, *range(84, 104), *[-1] * 44]
    assert buffers.batch.logit_rows.tolist() == [20, 0, 0]
