"""Passes of the layer for drafts from fixed buffers, padded: the same drafts, and nothing else
touched."""

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
from step_graphs import SPECS, HostFree, Written, started
from sweeps import quick
from wait_counts import Traffic, resident

from vlm_serve.engine.requests.plan import SequenceInfo
from vlm_serve.engine.steps.batching import KnownSequence
from vlm_serve.engine.steps.draft_graphs import DraftBuffers, DraftGraphs
from vlm_serve.engine.steps.mtp_runner import MtpInput, MtpRunner, make_draft_batch
from vlm_serve.engine.steps.step_graphs import StepGraphs
from vlm_serve.engine.steps.step_sizes import SequenceLimits, StepSize, pass_sizes
from vlm_serve.engine.steps.step_tables import HostRing
from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.dispatch import triton_everywhere
from vlm_serve.kernels.triton_support import Target, interpreted, record_launches
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardOutput
from vlm_serve.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")

DRAFTS = 3


@pytest.fixture(scope="module", params=quick(["dense", "moe"], ["dense"], pytest.mark.interpreter))
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    spec = replace(SPECS[request.param], mtp=True)
    checkpoint: Path = make_checkpoint(tmp_path_factory.mktemp("graphs"), spec)
    with kernel_model(checkpoint, drafts=True) as made:
        yield made


class Awaited(DraftGraphs):
    """Graphs on a device behind the host, whose results are read at once."""

    def run(self, *arguments: object) -> ForwardOutput | None:
        return self._waited(super().run(*arguments))  # type: ignore[arg-type]

    def run_later(self, *arguments: object) -> ForwardOutput:
        output = self._waited(super().run_later(*arguments))  # type: ignore[arg-type]
        assert output is not None
        return output

    def _waited(self, output: ForwardOutput | None) -> ForwardOutput | None:
        assert isinstance(self._device, QueuedDevice)
        self._device.synchronize()
        return output


def graphs_over(driver: Driver) -> DraftGraphs:
    """Graphs of few sizes: the interpreter computes every size once."""
    return Awaited(
        driver.model,
        driver.caches,
        (StepSize(0, 3, 1), StepSize(0, 3, DRAFTS + 2)),
        block_size=driver.block_size,
        max_model_len=100,
        device=QueuedDevice(),
    )


class Drafted:
    """Two sequences whose prompts the layer has read, but for their last tokens."""

    LENGTHS = (9, 40)

    def __init__(self, model: Model) -> None:
        self.driver = Driver(model, scratch_rows=1)
        self.sequences = [text_sequence(random_ids(60, length)) for length in self.LENGTHS]
        self.known = [self._known(one) for one in self.sequences]
        inputs = [
            MtpInput(known, 1, tuple(one.tokens[1:length]))
            for known, one, length in zip(self.known, self.sequences, self.LENGTHS, strict=True)
        ]
        batch = make_draft_batch(inputs, self.driver.block_size)
        model.draft(batch, states(len(batch.token_ids)), self.driver.caches)

    def _known(self, one: Sequence_) -> KnownSequence:
        self.driver._make_room(one, len(one.tokens))
        info = SequenceInfo(one.row, tuple(one.tokens), one.positions, 0, SamplingParams(), seed=0)
        known = KnownSequence(info)
        known.table.extend(one.blocks)
        return known

    def inputs(self, *wanted: tuple[int, int, int]) -> list[MtpInput]:
        """Return inputs: (sequence, tokens that are read, drafts)."""
        return [
            MtpInput(
                self.known[place],
                self.LENGTHS[place],
                tuple(self.sequences[place].tokens[self.LENGTHS[place] :][:count]),
                wanted=drafts,
            )
            for place, count, drafts in wanted
        ]


def states(count: int) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(count))


def test_sizes() -> None:
    assert pass_sizes(1, 3) == tuple(StepSize(0, 1, room) for room in (1, 2, 5))
    assert {each.drafted for each in pass_sizes(12, 3) if each.room == 5} == {1, 2, 4, 8, 12}
    assert max(each.drafted for each in pass_sizes(300, 7) if each.room == 9) == 16
    assert StepSize(0, 300, 1) in pass_sizes(300, 7)


def test_drafts_are_those_of_plain_passes(model: Model) -> None:
    """Of a sequence that wants several, one that wants one, and one that wants none."""
    plain, padded = Drafted(model), Drafted(model)
    graphs = graphs_over(padded.driver)
    runners = [
        MtpRunner(model, each.driver.caches, each.driver.block_size, own)
        for each, own in ((plain, None), (padded, graphs))
    ]
    graphs.best = resident(graphs.best)
    for wanted in (((1, 2, 3), (0, 5, 1)), ((0, 1, 0), (1, 3, 2)), ((0, 1, 0),)):
        before = states(sum(count for _, count, _ in wanted))
        with Traffic() as found:
            drafts = [
                runner._draft(each.inputs(*wanted), before)
                for runner, each in zip(runners, (plain, padded), strict=True)
            ]
        assert drafts[0] == drafts[1]
        assert not found.copies.total() and found.waits.total() == any(drafts), "one at the end"
        assert list(map(len, drafts[1])) == [count for _, _, count in wanted if count]
    for ours, theirs in zip(
        plain.driver.caches.of_unit("block"), padded.driver.caches.of_unit("block"), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0, equal_nan=True)


def test_a_pass_writes_its_own_keys_alone(model: Model) -> None:
    drafted = Drafted(model)
    graphs, written = graphs_over(drafted.driver), Written(drafted.driver.caches)
    runner = MtpRunner(model, drafted.driver.caches, drafted.driver.block_size, graphs)
    runner._draft(drafted.inputs((0, 2, 3), (1, 4, 1)), states(6))
    first, second = drafted.sequences
    expected = {drafted.driver._slot(first, 9 + place) for place in range(2 + 2)}
    expected |= {drafted.driver._slot(second, 40 + place) for place in range(4)}
    assert written.slots() == expected
    assert not any(written.rows())


def test_what_is_not_accepted(model: Model) -> None:
    drafted = Drafted(model)
    graphs, size = graphs_over(drafted.driver), drafted.driver.block_size
    good = drafted.inputs((0, 2, 1))
    assert graphs.run(make_draft_batch(good, size), states(2)) is not None
    pictured = replace(good[0], media=((9, torch.zeros(1, 64)),))
    for refused in ([pictured], drafted.inputs((0, 6, 1)), 4 * good):
        assert graphs.run(make_draft_batch(refused, size), states(8)) is None
    beyond = drafted.inputs((0, 2, 1))
    beyond[0].known.table[0] = drafted.driver.caches.num_blocks
    with pytest.raises(KernelArgumentError):
        graphs.run(make_draft_batch(beyond, size), states(2))


@pytest.mark.parametrize("kind", ["prefill", "decode", "verify"])
def test_captured_steps_report_their_hidden_states(model: Model, kind: str) -> None:
    """In the order of the tokens, without padding: the layer reads them. The size in use is not the
    one that was captured last."""
    sizes: tuple[StepSize, ...] = (StepSize(1), StepSize(3))
    found = []
    for captured in (False, True):
        driver = Driver(model, scratch_rows=1, most_drafts=4)
        one, other = started(driver, (5, 20))
        limits: dict[str, Any] = {
            "block_size": driver.block_size,
            "max_model_len": 100,
            "device": QueuedDevice(),
        }
        step: dict[str, Any] = {"decodes": [one]}
        if kind == "prefill":
            sizes = tuple(StepSize(3, prompts=3, tokens=tokens) for tokens in (8, 32))
            step |= {"prefills": [(text_sequence(random_ids(9, 1)), 0, 9)], "all_logits": False}
        elif kind == "verify":
            sizes = StepSize(0, 1, 4), StepSize(2, 2, 4)
            other.tokens += [3, 4]
            step |= {"drafts": [(other, 20, 0)]}
        else:
            step["decodes"].append(other)
        if captured:
            driver.forward = running(StepGraphs(model, driver.caches, sizes, **limits))
        hidden = driver.step(**step).hidden
        assert hidden is not None
        found.append(hidden.clone())
    assert found[1].shape == found[0].shape
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=0)


def test_a_pass_asks_nothing_of_the_host(model: Model) -> None:
    driver, device = Driver(model, scratch_rows=1), QueuedDevice()
    limits = SequenceLimits(driver.block_size, 7, 0)
    batch = DraftBuffers(StepSize(0, 2, 3), limits, HostRing(device), torch.device("cpu")).batch
    device.synchronize()
    with triton_everywhere(), record_launches(Target("cuda", 90)) as launches:
        model.draft(batch, states(6), driver.caches)  # what belongs to the weights is derived once
        count = len(launches)
        with HostFree():  # type: ignore[no-untyped-call]
            model.draft(batch, states(6), driver.caches)
        assert len(launches) == 2 * count > 0
