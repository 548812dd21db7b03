"""Rows that are sampled together have the tokens that they have one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from sampling_cases import small
from triton_case import kernels

from vlm_serve.engine.requests.plan import SampledToken, SampleTask, SequenceInfo
from vlm_serve.engine.steps import sampler as sampling
from vlm_serve.engine.steps.sampler import SequenceSampler, sample
from vlm_serve.kernels.sampling.reference import draw_rows as draw
from vlm_serve.sampling_params import SamplingParams

VOCAB = 97
NEUTRAL = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0)
CHANGES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 5},
    {"top_k": 1},
    {"top_p": 0.7},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.5, "min_p": 0.05, "temperature": 1.7},
    {"logprobs": 3},
    {"logprobs": 0, "top_p": 0.9},
    {"logprobs": 0, "logprob_token_ids": (3, 90, 41)},
    {"logprobs": 3, "logprob_token_ids": tuple(range(0, 80, 2)), "logit_bias": {3: 4.0}},
    {"temperature": 0.0, "logprobs": 2},
    {"logit_bias": {3: 4.0, 5: -100.0}},
    {"presence_penalty": 0.8, "frequency_penalty": 0.2, "logit_bias": {7: 2.0}},
    {"temperature": 0.0},
]


def draw_rows(
    logits: torch.Tensor, params: list[SamplingParams], uniforms: list[float]
) -> torch.Tensor:
    """Draw from logits by the numbers that a sampler has for its rows."""
    info = SequenceInfo(0, (1, 2), torch.zeros(3, 2), 0, NEUTRAL, 0)
    own = [SequenceSampler(replace(info, params=each)) for each in params]
    pairs = zip(own, uniforms, strict=True)
    numbers = [(*each.numbers(0)[:3], uniform, 0, 0, 0, 0) for each, uniform in pairs]
    top_k = torch.tensor([each.top_k for each in own])
    return draw(logits, torch.tensor(numbers, dtype=torch.float64), top_k)


def mask(rng: random.Random) -> bytes:
    """One that allows about half of the tokens."""
    return bytes(rng.randrange(1, 256) for _ in range(-(-VOCAB // 8)))


def batch(seed: int) -> tuple[torch.Tensor, list[SampleTask], list[SamplingParams]]:
    """Logits, no two of a row equal, and tasks of all kinds."""
    rng = random.Random(seed)
    params = [replace(NEUTRAL, **rng.choice(CHANGES)) for _ in range(9)]
    tasks = []
    for number in range(len(params)):
        drafts = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 2]))]
        for place, draft in enumerate([*drafts, None]):
            own = mask(rng) if rng.random() < 0.3 else None
            unbiased = rng.random() < 0.1
            tasks.append(SampleTask(number, place, own, draft=draft, unbiased=unbiased))
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(len(tasks), VOCAB, generator=generator)
    return logits, tasks, params


def samplers(params: list[SamplingParams]) -> dict[int, SequenceSampler]:
    return {
        number: SequenceSampler(
            SequenceInfo(number, (1, 2), torch.zeros(3, 2), 0, own, 40 + number)
        )
        for number, own in enumerate(params)
    }


def sampled(
    logits: torch.Tensor, tasks: list[SampleTask], params: list[SamplingParams]
) -> dict[int, tuple[SampledToken, ...]]:
    return sample(logits, tasks, samplers(params), range(len(tasks)))


@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_those_of_rows_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, tasks, params = batch(seed)
    expected = sampled(logits, tasks, params)
    monkeypatch.setattr(sampling, "at_once", lambda logits: True)
    found = sampled(logits, tasks, params)
    assert found.keys() == expected.keys()
    for number, ones in expected.items():
        assert [one.token_id for one in found[number]] == [one.token_id for one in ones]
        for one, other in zip(found[number], ones, strict=True):
            assert one.logprobs == other.logprobs


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", range(2))
def test_kernels_have_the_tokens_of_rows_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, tasks, params = batch(seed)
    expected = sampled(logits, tasks, params)
    monkeypatch.setattr(sampling, "at_once", lambda logits: True)
    with kernels(), small(TILE=128, LISTED=128, BINS=128, _PART=128, _AT_ONCE=128):
        found = sampled(logits, tasks, params)
    for number, ones in expected.items():
        assert [one.token_id for one in found[number]] == [one.token_id for one in ones]
        for one, other in zip(found[number], ones, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_row_s_token_does_not_depend_on_the_rows_beside_it() -> None:
    """With many equal logits, as those of 16-bit types are."""
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(12, VOCAB, generator=generator)).round()
    params = [replace(NEUTRAL, **CHANGES[number % 8]) for number in range(12)]
    uniforms = [0.08 * number for number in range(12)]
    together = draw_rows(logits, params, uniforms)
    for place in range(12):
        own = slice(place, place + 1)
        assert draw_rows(logits[own], params[own], uniforms[own])[0] == together[place]


def test_equal_logits_are_drawn_equally_often() -> None:
    logits = torch.zeros(400, 4)
    found = draw_rows(logits, [NEUTRAL] * 400, [number / 400 for number in range(400)])
    assert torch.bincount(found).tolist() == [100] * 4
    first = draw_rows(logits, [replace(NEUTRAL, top_k=2)] * 400, [n / 400 for n in range(400)])
    assert torch.bincount(first).tolist() == [200, 200]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_rows_without_numbers_have_no_tokens(
    seed: int, fault: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And change those of no others; a GPU would stop for good at an index that is not there."""
    logits, tasks, params = batch(seed)
    expected = sampled(logits, tasks, params)
    bad = {0, 4, 5}
    for row, task in enumerate(tasks):
        if task.sequence in bad:
            logits[row] = fault
    for together in (False, True):
        monkeypatch.setattr(sampling, "at_once", lambda logits, together=together: together)
        found = sampled(logits, tasks, params)
        assert {number for number, (*_, last) in found.items() if last.token_id < 0} == bad
        for number in found.keys() - bad:
            tokens = [one.token_id for one in found[number]]
            assert tokens == [one.token_id for one in expected[number]]
