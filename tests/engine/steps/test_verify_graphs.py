"""Steps with drafts from fixed buffers, padded: the same answers, and nothing else touched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_models import kernel_model
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence
from parity_cases import random_ids
from queued_device import QueuedDevice, running
from step_graphs import SPECS, HostFree, Written, bits, started
from sweeps import quick

from vlm_serve.engine.steps.step_buffers import StepBuffers
from vlm_serve.engine.steps.step_graphs import StepGraphs
from vlm_serve.engine.steps.step_sizes import SequenceLimits, StepSize, verify_sizes
from vlm_serve.engine.steps.step_tables import HostRing
from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.dispatch import triton_everywhere
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.kernels.metadata import DecodeMeta, VerifyMeta
from vlm_serve.kernels.triton_support import Target, interpreted, record_launches
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")

MOST = 4
"""Updates of a sequence."""


@pytest.fixture(scope="module", params=quick(SPECS, ["dense"], pytest.mark.interpreter))
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    checkpoint: Path = make_checkpoint(tmp_path_factory.mktemp("graphs"), SPECS[request.param])
    with kernel_model(checkpoint) as made:
        yield made


def graphs_over(driver: Driver) -> StepGraphs:
    """Graphs of two sizes: every size is computed by the interpreter once."""
    return StepGraphs(
        driver.model,
        driver.caches,
        (StepSize(0, 1, MOST), StepSize(2, 2, MOST)),
        block_size=driver.block_size,
        max_model_len=100,
        device=QueuedDevice(),
    )


def test_sizes() -> None:
    assert [vars_of(each) for each in verify_sizes(1, 3)] == [(0, 1, 4)]
    found = [vars_of(each) for each in verify_sizes(8, 3)]
    assert {each[1:] for each in found} == {
        (1, 4), (2, 4), (4, 4), (8, 4), (1, 8), (2, 8),
    }  # fmt: skip
    assert {each[0] for each in found if each[2] == 4} == {0, 7}
    assert {each[0] for each in found if each[2] == 8} == {0, 1}
    assert max(each.drafted * each.room for each in verify_sizes(64, 7)) == 256
    assert {each.decodes for each in verify_sizes(64, 7) if each.room == 8} == {0, 8, 63}


def vars_of(sizes: StepSize) -> tuple[int, int, int]:
    return sizes.decodes, sizes.drafted, sizes.room


class Played:
    """Sequences that get tokens, of which some hold, as the plans of an engine would have it."""

    def __init__(self, driver: Driver, lengths: tuple[int, ...]) -> None:
        self.driver = driver
        self.texts = [random_ids(60, 60 + place) for place in range(len(lengths))]
        self.sequences = started(driver, lengths)
        self._done = [len(one.tokens) - 1 for one in self.sequences]
        self._pending = [0] * len(lengths)

    def batch(self, drafts: dict[int, tuple[int, int]], decodes: tuple[int, ...] = ()) -> Any:
        """Return the arguments of a driver's step.

        Args:
            drafts: by place, how many tokens hold, and how many others there are.
            decodes: places of sequences that decode.
        """
        for place in decodes:
            at = self._done[place]
            self.sequences[place].tokens[at:] = self.texts[place][at : at + 1]
            self._done[place] += 1
        slices = []
        for place, (kept, wrong) in drafts.items():
            one, at = self.sequences[place], self._done[place]
            one.tokens[at:] = self.texts[place][at : at + kept] + [5 + at] * wrong
            slices.append((one, at, self._pending[place]))
            self._done[place], self._pending[place] = at + kept, kept
        return {"decodes": [self.sequences[place] for place in decodes], "drafts": slices}

    def step(
        self, drafts: dict[int, tuple[int, int]], decodes: tuple[int, ...] = ()
    ) -> torch.Tensor:
        return self.driver.step(**self.batch(drafts, decodes)).logits.clone()

    def states(self) -> list[torch.Tensor]:
        for place, count in enumerate(self._pending):
            if self.driver.caches.num_rows and count:
                self.driver.fold(self.sequences[place], count)
        rows = [one.row for one in self.sequences]
        return [pool[rows].clone() for pool in self.driver.caches.of_unit("row")]


TURNS: list[Any] = [
    ({0: (2, 1)},),
    ({0: (3, 1), 1: (1, 1)},),
    ({1: (1, 0), 0: (1, 2)}, (2,)),
    ({1: (2, 2)}, (2, 3)),
    ({0: (4, 0), 1: (1, 3)}, (3,)),
]
"""Drafts, and sequences that decode beside them."""


def test_padded_steps_equal_plain_ones(model: Model) -> None:
    plain = Played(Driver(model, most_drafts=MOST), (5, 40, 33, 17))
    padded = Played(Driver(model, scratch_rows=1, most_drafts=MOST), (5, 40, 33, 17))
    padded.driver.forward = running(graphs_over(padded.driver))
    for turn in TURNS:
        got, expected = padded.step(*turn), plain.step(*turn)
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    for got, expected in zip(padded.states(), plain.states(), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_padding_touches_its_scratch_row_alone(model: Model) -> None:
    played = Played(Driver(model, scratch_rows=1, most_drafts=MOST), (5, 40, 33))
    driver, caches = played.driver, played.driver.caches
    driver.forward = running(graphs_over(driver))
    played.step({0: (2, 1)})
    a, b, c = played.sequences
    for pool in caches.of_unit("update"):
        pool[[entry for entry in range(len(pool)) if entry // MOST != a.row]] = float("nan")
    before = [pool.clone() for pool in caches.of_unit("update")]
    written = Written(caches)
    logits = played.step({0: (1, 1), 1: (1, 0)}, (2,))
    assert logits.shape[0] == 4 and logits.isfinite().all()
    if caches.of_unit("block"):
        slots = {driver._slot(one, len(one.tokens) - 1) for one in (a, b, c)}
        assert written.slots() == slots | {driver._slot(a, len(a.tokens) - 2)}
    # Of the sequences with drafts, one had updates to fold.
    assert all(rows == {a.row, c.row, caches.num_rows - 1} for rows in written.rows())
    entries = {a.row * MOST, a.row * MOST + 1, b.row * MOST}
    for old, new in zip(before, caches.of_unit("update"), strict=True):
        same = (old.nan_to_num(9) == new.nan_to_num(9)).flatten(1).all(1)
        assert set((~same).nonzero().flatten().tolist()) == entries


def step_batch(driver: Driver, **step: Any) -> ForwardBatch:
    """Return what a step would give the model, without computing it."""
    seen: list[ForwardBatch] = []

    def keep(batch: ForwardBatch, caches: CacheTensors) -> ForwardOutput:
        seen.append(batch)
        return ForwardOutput(torch.empty(0))

    driver.forward = keep
    driver.step(**step)
    return seen[0]


def test_what_is_not_accepted(model: Model) -> None:
    played = Played(Driver(model, scratch_rows=1, most_drafts=MOST), (5, 6, 7, 8))
    driver, graphs = played.driver, graphs_over(played.driver)
    good = step_batch(driver, **played.batch({0: (1, 3), 1: (1, 0)}, (2, 3)))
    assert graphs.run(good) is not None
    prompt = text_sequence(random_ids(4, 4))
    refused = [
        step_batch(driver, **played.batch({0: (1, 4)})),
        step_batch(driver, **played.batch({0: (1, 0), 1: (1, 0), 2: (1, 0)})),
        step_batch(driver, **played.batch({}, (2, 3))),
        step_batch(driver, **played.batch({0: (1, 1)}), prefills=[(prompt, 0, 4)]),
        replace(good, logit_rows=torch.arange(2)),
        replace(good, media=((0, torch.zeros(1, 64)),)),
        replace(good, capture_experts=True),
        replace(good, changes=RowChanges([AdapterChanges({}, 0)], [0] * len(good.token_ids))),
        replace(good, deterministic=True),
    ]
    assert all(graphs.run(each) is None for each in refused)


def test_bad_rows_and_updates_are_refused(model: Model) -> None:
    played = Played(Driver(model, scratch_rows=1, most_drafts=MOST), (5,))
    driver, graphs = played.driver, graphs_over(played.driver)
    batch = step_batch(driver, **played.batch({0: (1, 1)}))
    assert batch.verify is not None
    before, caches = bits(driver.caches), driver.caches
    bad: list[dict[str, Any]] = [{"block_tables": ((64,),)}]
    if caches.num_rows:
        bad += [{"rows": (caches.num_rows - 1,)}, {"updates": (caches.num_updates - 1,)}]
    for changes in bad:
        wrong = replace(batch, verify=replace(batch.verify, **changes, checked=set()))
        with pytest.raises(KernelArgumentError):
            graphs.run(wrong)
    assert all(map(torch.equal, before, bits(caches)))


def test_a_step_asks_nothing_of_the_host(model: Model) -> None:
    driver = Driver(model, scratch_rows=1, most_drafts=MOST)
    device, limits = QueuedDevice(), SequenceLimits(driver.block_size, 7, 16)
    sizes, ring = StepSize(2, 2, MOST), HostRing(device)
    batch = StepBuffers(sizes, limits, ring, torch.device("cpu")).batch
    device.synchronize()
    with triton_everywhere(), record_launches(Target("cuda", 90)) as launches:
        model.forward(batch, driver.caches)  # what belongs to the weights is derived once
        count = len(launches)
        with HostFree():  # type: ignore[no-untyped-call]
            model.forward(batch, driver.caches)
        assert len(launches) == 2 * count > 0


def test_tables_behind_a_step_are_padding() -> None:
    device, limits = QueuedDevice(), SequenceLimits(16, 3, scratch_row=9)
    sizes, ring = StepSize(1, 2, 3), HostRing(device)
    buffers = StepBuffers(sizes, limits, ring, torch.device("cpu"))
    batch = ForwardBatch(
        token_ids=torch.tensor([1, 2, 3]),
        positions=torch.tensor([[20, 17, 18]] * 3),
        slots=torch.tensor([36, 81, 82]),
        decode=DecodeMeta(((2, 2),), (21,), (3,), (3,), (-1,)),
        prefill=None,
        media=(),
        logit_rows=torch.arange(3),
        verify=VerifyMeta((0, 2), (17,), ((4, 5),), (7,), (12,), (2,)),
    )
    buffers.fill(batch)
    device.synchronize()
    verify, decode = buffers.batch.verify, buffers.batch.decode
    assert verify is not None and decode is not None
    assert {name: table.tolist() for name, table in verify.tensors.items()} == {
        "kv_lens": [18, 19, 1, 1, 1, 1],
        "block_tables": [[4, 5, 0], [4, 0, 0]],
        "slices": [[7, 12, 2, 0, 2], [0, 0, 0, 3, 0]],
        "entries": [12, 13, -1, -1, -1, -1],
    }
    assert buffers.batch.token_ids.tolist() == [1, 2, 3, 0, 0, 0, 0]
    assert buffers.batch.slots.tolist() == [36, 81, 82, -1, -1, -1, -1]
    assert buffers.batch.logit_rows.tolist() == [0, 1, 2, 0, 0, 0, 0]
    buffers.fill(replace(batch, decode=None, token_ids=torch.tensor([2, 3])))
    device.synchronize()
    assert decode.tensors["block_tables"].tolist() == [[4, 0, 0]]
    assert decode.tensors["dst_rows"].tolist() == [9]
