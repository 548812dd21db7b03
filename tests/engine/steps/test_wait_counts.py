"""How often the host waits for a GPU, and copies to it itself, beside a step: ceilings that only
fall. The device's launches have theirs in `tests/data/launches.toml`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from wait_counts import GPU, Traffic, resident

from vlm_serve.engine.requests.plan import SampleTask, SequenceInfo
from vlm_serve.engine.steps.prompt_rows import logprob_rows
from vlm_serve.engine.steps.row_sampling import Chosen, prepare
from vlm_serve.engine.steps.sampler import SequenceSampler, sample
from vlm_serve.engine.steps.token_counts import TokenCounts
from vlm_serve.kernels import sampling
from vlm_serve.sampling_params import SamplingParams

VOCAB, ROWS = 64, 4
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, top_k=20)
PENALISED = dataclasses.replace(DRAWN, presence_penalty=1.5)
REPORTED = dataclasses.replace(DRAWN, logprobs=2)
ALLOWED = bytes([255] * (VOCAB // 8))


@pytest.fixture(autouse=True)
def rule() -> Iterator[None]:
    """Let torch compute what a launch would, unseen by those who count."""

    def computed(*args: Any, **options: Any) -> None:
        with torch._C.DisableTorchFunction():
            sampling._sample.torch(*args, **options)

    before = sampling._sample.replace_triton(computed)
    yield
    sampling._sample.replace_triton(before)


def traffic(params: SamplingParams, mask: bytes | None = None) -> tuple[int, int]:
    """Waits and copies of the second step of some sequences."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))
    position = torch.zeros(3, 1, dtype=torch.int64)
    with Traffic():
        counts = TokenCounts(ROWS, GPU)
    infos = [SequenceInfo(row, (5, 6), position, 0, params, seed=row) for row in range(ROWS)]
    samplers = {info.sequence: SequenceSampler(info) for info in infos}
    for step in range(2):
        tasks = [SampleTask(row, step, mask) for row in range(ROWS)]
        with Traffic() as found:
            tokens = sample(resident(logits), tasks, samplers, range(ROWS), counts=counts)
            for row, (one,) in tokens.items():
                samplers[row].replace(step, (one.token_id,))
    return found.waits.total(), found.copies.total()


@pytest.mark.parametrize(
    ("params", "mask", "waits", "copies"),
    [
        # One read of all tokens.
        (GREEDY, None, 1, 0),
        # The parameters of all rows come from pinned memory.
        (DRAWN, None, 1, 0),
        # So do masks.
        (DRAWN, ALLOWED, 1, 0),
        # The counts of penalties stay on the device.
        (PENALISED, None, 1, 0),
        # Log-probabilities come with the tokens.
        (REPORTED, None, 1, 0),
    ],
    ids=["greedy", "drawn", "masked", "penalised", "reported"],
)
def test_sampling_waits_once(
    params: SamplingParams, mask: bytes | None, waits: int, copies: int
) -> None:
    assert traffic(params, mask) == (waits, copies)


CROWD = 256
KINDS = (GREEDY, DRAWN, REPORTED, PENALISED, dataclasses.replace(PENALISED, logprobs=3, top_k=-1))


@pytest.mark.parametrize("mask", [None, ALLOWED], ids=["free", "masked"])
def test_sampling_for_the_next_step_waits_for_nothing(mask: bytes | None) -> None:
    """A crowd of all kinds, whose newest tokens the host does not know."""
    logits = torch.randn(CROWD, VOCAB, generator=torch.Generator().manual_seed(2))
    position = torch.zeros(3, 1, dtype=torch.int64)
    kinds = [KINDS[row % len(KINDS)] for row in range(CROWD)]
    samplers = {
        row: SequenceSampler(SequenceInfo(row, (5, 6), position, 0, params, seed=row))
        for row, params in enumerate(kinds)
    }
    chosen = list[Chosen]()
    with Traffic():
        counts = TokenCounts(CROWD, GPU)
    before = following = resident(torch.zeros(CROWD, dtype=torch.int64))
    for step in range(3):
        tasks = [SampleTask(row, step, mask) for row in range(CROWD)]
        with Traffic() as found:
            lines = range(CROWD)
            run = prepare(
                resident(logits),
                tasks,
                samplers,
                lines,
                counts,
                before=before if step else None,
                following=following,
            )
            chosen.append(run())
        assert (found.waits.total(), found.copies.total()) == (0, 0)
    # The table holds what was sampled, but for the last step's.
    tokens = [each.found[0, :, 0].as_subclass(torch.Tensor) for each in chosen]
    table = counts.table.as_subclass(torch.Tensor) & ((1 << 30) - 1)
    for row, params in enumerate(kinds):
        if params.presence_penalty:
            expected = torch.bincount(torch.stack(tokens[:2])[:, row], minlength=VOCAB)
            index = counts._slots[row].index
            assert table[index].tolist() == expected.tolist()


def test_log_probabilities_of_a_prompt_wait_for_each_of_their_columns() -> None:
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1))
    with Traffic() as found:
        logprob_rows(resident(logits), range(8), 2)
    assert (found.waits.total(), found.copies.total()) == (4, 1)


HERE = torch.zeros(3)
CALLS: dict[str, tuple[Callable[[Any], Any], int, int]] = {
    "tolist": (lambda x: x.tolist(), 1, 0),
    "item": (lambda x: x[0].item(), 1, 0),
    "float": (lambda x: float(x[0]), 1, 0),
    "if": (lambda x: bool(x[0] > 0), 1, 0),
    "cpu": (lambda x: x.cpu().numpy().tolist(), 1, 0),
    "to the host": (lambda x: x.to("cpu"), 1, 0),
    "to another one's": (lambda x: (x.to(HERE), HERE.to(x) + x), 1, 1),
    "nonzero": (lambda x: torch.nonzero(x), 1, 0),
    "a mask": (lambda x: x[x > 0], 1, 0),
    "into the host's": (lambda x: HERE.clone().copy_(x), 1, 0),
    "new": (lambda x: torch.tensor([1.0], device=x.device) + x, 0, 1),
    "to the device": (lambda x: HERE.to(x.device) + x, 0, 1),
    "asynchronous": (lambda x: HERE.to(x.device, non_blocking=True) + x, 0, 0),
    "a list": (lambda x: x[[0, 2]], 0, 1),
    "list and values": (lambda x: x.clone().__setitem__([0, 2], HERE[:2]), 0, 2),
    "computing": (lambda x: (x.float() * 2).softmax(0)[1:].clone().add_(1), 0, 0),
    "of no size": (lambda x: torch.zeros(3, device=x.device) + x + torch.tensor(1.0), 0, 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_counted(name: str) -> None:
    call, waits, copies = CALLS[name]
    with Traffic() as found:
        call(resident(torch.ones(3)))
    assert (found.waits.total(), found.copies.total()) == (waits, copies)


def test_devices_do_not_meet() -> None:
    here, there = torch.ones(3), resident(torch.ones(3))
    with Traffic():
        assert there.device.type == "cuda" and (there + 1).device.type == "cuda"
        assert there.cpu().device.type == here.device.type == "cpu"
        with pytest.raises(AssertionError, match="two devices"):
            here + there
        with pytest.raises(AssertionError, match="numpy"):
            there.numpy()
