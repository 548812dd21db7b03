"""How often the host waits for a GPU, and copies to it itself, beside a step: ceilings that only
fall. The device's launches have theirs in `tests/data/launches.toml`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from wait_counts import Traffic, resident

from vlm_serve.engine.requests.plan import SampleTask, SequenceInfo
from vlm_serve.engine.steps.prompt_rows import logprob_rows
from vlm_serve.engine.steps.sampler import SequenceSampler, choose_tasks, sample
from vlm_serve.sampling_params import SamplingParams

VOCAB, ROWS = 64, 4
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, top_k=20)
PENALISED = dataclasses.replace(DRAWN, presence_penalty=1.5)
REPORTED = dataclasses.replace(DRAWN, logprobs=2)
ALLOWED = bytes([255] * (VOCAB // 8))


def traffic(params: SamplingParams, mask: bytes | None = None) -> tuple[int, int]:
    """Waits and copies of the second step of some sequences."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))
    position = torch.zeros(3, 1, dtype=torch.int64)
    infos = [SequenceInfo(row, (5, 6), position, 0, params, seed=row) for row in range(ROWS)]
    samplers = {info.sequence: SequenceSampler(info) for info in infos}
    for step in range(2):
        tasks = [SampleTask(row, step, mask) for row in range(ROWS)]
        with Traffic() as found:
            tokens = sample(resident(logits), tasks, samplers, range(ROWS))
            for row, (one,) in tokens.items():
                samplers[row].replace(step, (one.token_id,))
    return found.waits.total(), found.copies.total()


@pytest.mark.parametrize(
    ("params", "mask", "waits", "copies"),
    [
        # One read of all tokens.
        (GREEDY, None, 1, 0),
        # The parameters of all rows, and which rows are drawn, come from pinned memory.
        (DRAWN, None, 1, 0),
        # So do masks.
        (DRAWN, ALLOWED, 1, 0),
        # Each row's new counts, with the places of their tokens.
        (PENALISED, None, 1, 2 * ROWS),
        # And the tokens' log-probabilities: ids, values, tokens.
        (REPORTED, None, 3, 0),
    ],
    ids=["greedy", "drawn", "masked", "penalised", "reported"],
)
def test_sampling_waits_once(
    params: SamplingParams, mask: bytes | None, waits: int, copies: int
) -> None:
    assert traffic(params, mask) == (waits, copies)


@pytest.mark.parametrize("mask", [None, ALLOWED], ids=["free", "masked"])
def test_sampling_for_the_next_step_waits_for_nothing(mask: bytes | None) -> None:
    """Rows of all kinds that a step may be ahead of."""
    logits, position = torch.randn(ROWS, VOCAB), torch.zeros(3, 1, dtype=torch.int64)
    kinds = (GREEDY, DRAWN, REPORTED, GREEDY)
    samplers = {
        row: SequenceSampler(SequenceInfo(row, (5, 6), position, 0, params, seed=row))
        for row, params in enumerate(kinds)
    }
    tasks = [SampleTask(row, 1, mask) for row in range(ROWS)]
    with Traffic() as found:
        chosen = choose_tasks(resident(logits), tasks, samplers, range(ROWS))
    assert (found.waits.total(), found.copies.total()) == (0, 0)
    assert len(chosen.tokens) == ROWS


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
