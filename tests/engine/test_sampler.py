"""Sampling: greedy, filters, penalties, log-probabilities, repeatable draws."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from vlm_serve.engine.plan import SampleTask
from vlm_serve.engine.sampler import sample, uniform
from vlm_serve.sampling_params import SamplingParams

NEUTRAL = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0)
LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))


def _task(
    params: SamplingParams,
    *,
    history: tuple[int, ...] = (),
    prompt: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    seed: int = 0,
) -> SampleTask:
    return SampleTask(0, params, history, prompt, banned, seed)


def _draws(params: SamplingParams, count: int = 2000, **options: object) -> Counter[int]:
    tasks = [_task(params, seed=seed, **options) for seed in range(count)]  # type: ignore[arg-type]
    return Counter(s.token_id for s in sample(LOGITS, tasks, [0] * count))


def test_greedy_takes_the_most_likely() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    tasks = [_task(replace(NEUTRAL, temperature=0.0))] * 2
    assert [s.token_id for s in sample(logits, tasks, [1, 0])] == [0, 1]


def test_draws_follow_the_distribution() -> None:
    counts = _draws(NEUTRAL)
    for token, share in enumerate((0.5, 0.25, 0.15, 0.1)):
        assert abs(counts[token] / 2000 - share) < 0.04


def test_a_temperature_sharpens() -> None:
    assert _draws(replace(NEUTRAL, temperature=0.25))[0] > 1800


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.01}, {0}),
        ({"min_p": 0.4}, {0, 1}),
        ({"top_k": 3, "top_p": 0.5}, {0}),
    ],
)
def test_filters_keep_what_they_say(change: dict[str, float], kept: set[int]) -> None:
    assert set(_draws(replace(NEUTRAL, **change))) == kept  # type: ignore[arg-type]


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    first = sample(LOGITS, [_task(NEUTRAL, seed=5, history=(1, 2))], [0])
    again = sample(LOGITS.repeat(3, 1), [_task(NEUTRAL, seed=5, history=(1, 2))] * 3, [2, 1, 0])
    assert {s.token_id for s in again} == {first[0].token_id}
    assert len({uniform(5, position) for position in range(100)}) == 100


def test_banned_tokens_never_come() -> None:
    assert 0 not in _draws(NEUTRAL, banned=(0,))
    greedy = _task(replace(NEUTRAL, temperature=0.0), banned=(0,))
    assert sample(LOGITS, [greedy], [0])[0].token_id == 1


def test_penalties() -> None:
    greedy = replace(NEUTRAL, temperature=0.0)
    presence = _task(replace(greedy, presence_penalty=1.0), history=(0,))
    assert sample(LOGITS, [presence], [0])[0].token_id == 1
    frequency = replace(greedy, frequency_penalty=0.5)
    assert sample(LOGITS, [_task(frequency, history=(0,))], [0])[0].token_id == 0
    assert sample(LOGITS, [_task(frequency, history=(0, 0))], [0])[0].token_id == 1
    repetition = _task(replace(greedy, repetition_penalty=3.0), prompt=(0,))
    assert sample(LOGITS, [repetition], [0])[0].token_id == 1


def test_logprobs_are_those_of_the_model_with_the_sampled_token_included() -> None:
    params = replace(NEUTRAL, temperature=0.0, logprobs=2)
    sampled = sample(LOGITS, [_task(params, banned=(0, 1))], [0])[0]
    assert sampled.token_id == 2
    assert set(sampled.logprobs) == {0, 1, 2}
    assert sampled.logprobs[2] == pytest.approx(math.log(0.15), abs=1e-6)
    only = sample(LOGITS, [_task(replace(params, logprobs=0))], [0])[0]
    assert set(only.logprobs) == {0}
