"""Sampling: greedy, filters, penalties, log-probabilities, repeatable draws."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from vlm_serve.engine.requests.plan import SampledToken, SampleTask, SequenceInfo
from vlm_serve.engine.steps.sampler import SequenceSampler, sample, uniform
from vlm_serve.kernels.sampling.reference import UNSOUND
from vlm_serve.sampling_params import SamplingParams

NEUTRAL = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0)
GREEDY = replace(NEUTRAL, temperature=0.0)
LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))


def _sample(
    logits: torch.Tensor,
    params: SamplingParams,
    rows: Sequence[int] = (0,),
    *,
    history: tuple[int, ...] = (),
    prompt: tuple[int, ...] = (),
    allowed: tuple[int, ...] | None = None,
    seeds: Iterable[int] = itertools.repeat(0),
) -> list[SampledToken]:
    """A token for each row, from sequences alike but for their seeds."""
    mask = None if allowed is None else bytes([sum(1 << token for token in allowed)])
    samplers: dict[int, SequenceSampler] = {}
    for number, seed in zip(range(len(rows)), seeds, strict=False):
        info = SequenceInfo(number, prompt, torch.zeros(3, len(prompt)), 0, params, seed)
        samplers[number] = SequenceSampler(info)
        samplers[number].replace(0, history)
    tasks = [SampleTask(number, len(history), mask) for number in range(len(rows))]
    return [one for (one,) in sample(logits, tasks, samplers, rows).values()]


def _draws(
    params: SamplingParams, count: int = 2000, allowed: tuple[int, ...] | None = None
) -> Counter[int]:
    drawn = _sample(LOGITS, params, [0] * count, seeds=range(count), allowed=allowed)
    return Counter(one.token_id for one in drawn)


def test_greedy_takes_the_most_likely() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    sampled = _sample(logits, GREEDY, [1, 0])
    assert [one.token_id for one in sampled] == [0, 1]


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("width", [4, 1 << 17])
@pytest.mark.parametrize(
    "params",
    [GREEDY, NEUTRAL, replace(NEUTRAL, top_p=0.9), replace(GREEDY, logprobs=2)],
)
def test_a_row_that_holds_no_numbers_has_no_token(
    params: SamplingParams, width: int, fault: float
) -> None:
    """And others have theirs. Infinitely small logits alone are those that nobody may choose."""
    logits = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    expected = _sample(logits, params, [0, 1, 2, 3])
    logits[1] = fault
    logits[2, 3] = fault
    sampled = _sample(logits, params, [0, 1, 2, 3], allowed=None)
    faulty = [one.token_id == UNSOUND for one in sampled]
    assert faulty == [False, True, fault != -math.inf, False]
    assert [sampled[row] for row in (0, 3)] == [expected[row] for row in (0, 3)]


def test_a_mask_hides_no_fault() -> None:
    logits = torch.tensor([[0.0, 1.0, math.nan, 0.0], [0.0, 1.0, 0.0, 0.0]])
    sampled = _sample(logits, GREEDY, [0, 1], allowed=(0, 1))
    assert [one.token_id for one in sampled] == [UNSOUND, 1]


def test_greedy_need_not_look_where_somebody_has() -> None:
    task = SampleTask(0, 0)
    info = SequenceInfo(0, (), torch.zeros(3, 0), 0, GREEDY, 0)
    unread = torch.zeros(1, 4)
    ((one,),) = sample(unread, [task], {0: SequenceSampler(info)}, [0], [2]).values()
    assert one.token_id == 2
    masked = replace(task, mask=bytes([0b0011]))
    ((one,),) = sample(LOGITS, [masked], {0: SequenceSampler(info)}, [0], [2]).values()
    assert one.token_id == 0


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
        ({"top_p": 0}, {0}),
        ({"top_p": 0.0, "min_p": 0.1, "top_k": 2}, {0}),
        ({"min_p": 0.4}, {0, 1}),
        ({"top_k": 3, "top_p": 0.5}, {0}),
    ],
)
def test_filters_keep_what_they_say(change: dict[str, float], kept: set[int]) -> None:
    assert set(_draws(replace(NEUTRAL, **change))) == kept  # type: ignore[arg-type]


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    first = _sample(LOGITS, NEUTRAL, history=(1, 2), seeds=[5])
    again = _sample(LOGITS.repeat(3, 1), NEUTRAL, [2, 1, 0], history=(1, 2), seeds=[5] * 3)
    assert {one.token_id for one in again} == {first[0].token_id}
    assert len({uniform(5, position) for position in range(100)}) == 100


def test_masked_tokens_never_come() -> None:
    assert set(_draws(NEUTRAL, allowed=(1, 2, 3))) == {1, 2, 3}
    assert _sample(LOGITS, GREEDY, allowed=(1, 2, 3))[0].token_id == 1


def test_penalties() -> None:
    presence, frequency = (
        replace(GREEDY, presence_penalty=1.0),
        replace(GREEDY, frequency_penalty=0.5),
    )
    assert _sample(LOGITS, presence, history=(0,))[0].token_id == 1
    assert _sample(LOGITS, frequency, history=(0,))[0].token_id == 0
    assert _sample(LOGITS, frequency, history=(0, 0))[0].token_id == 1
    repetition = replace(GREEDY, repetition_penalty=3.0)
    assert _sample(LOGITS, repetition, prompt=(0,))[0].token_id == 1


def test_penalties_follow_what_is_replaced() -> None:
    """Tables that grow token by token, are given again and taken back equal those made at once."""
    params = replace(
        NEUTRAL, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.3, logprobs=0
    )
    rows = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    draw = random.Random(0)
    prompt = tuple(draw.choices(range(50), k=10))
    grown = SequenceSampler(SequenceInfo(0, prompt, torch.zeros(3, 10), 0, params, 3))
    history: list[int] = []
    for row in rows:
        first = draw.randint(max(0, len(history) - 3), len(history))
        history[first:] = draw.choices(range(50), k=draw.randint(1, 3))
        for _ in range(draw.randint(1, 2)):
            grown.replace(first, history[first:])
        task = SampleTask(0, len(history))
        (fresh,) = _sample(row[None], params, history=tuple(history), prompt=prompt, seeds=[3])
        assert grown.choose(row, task) == fresh
        values = row.clone()
        for token in {*prompt, *history}:
            values[token] = values[token] / 1.3 if values[token] > 0 else values[token] * 1.3
        for token, count in Counter(history).items():
            values[token] -= torch.tensor(0.7 + 0.3 * count)
        assert torch.equal(grown._changed(row), values)


def test_logprobs_are_those_of_the_model_with_the_sampled_token_included() -> None:
    params = replace(NEUTRAL, temperature=0.0, logprobs=2)
    sampled = _sample(LOGITS, params, allowed=(2, 3))[0]
    assert sampled.token_id == 2
    assert set(sampled.logprobs) == {0, 1, 2}
    assert sampled.logprobs[2] == pytest.approx(math.log(0.15), abs=1e-6)
    only = _sample(LOGITS, replace(params, logprobs=0))[0]
    assert set(only.logprobs) == {0}


def _verify(
    logits: torch.Tensor, params: SamplingParams, drafts: tuple[int, ...]
) -> tuple[SampledToken, ...]:
    info = SequenceInfo(0, (), torch.zeros(3, 0), 0, params, 5)
    tasks = [SampleTask(0, at, draft=draft) for at, draft in enumerate((*drafts, None))]
    return sample(logits, tasks, {0: SequenceSampler(info)}, range(len(tasks)))[0]


def test_sampling_stops_at_the_first_draft_that_is_not_sampled() -> None:
    logits = torch.eye(4)
    for drafts, tokens in (((0, 1, 2), [0, 1, 2, 3]), ((0, 3, 2), [0, 1]), ((1, 1, 2), [0])):
        assert [one.token_id for one in _verify(logits, GREEDY, drafts)] == tokens


def test_drafts_count_for_penalties_as_they_turn_out_to_hold() -> None:
    """The first two rows prefer token 1; once it has come, the next one is token 0."""
    logits = torch.tensor([[1.0, 2.0, 0.0, 0.0]] * 3)
    params = replace(GREEDY, presence_penalty=1.5)
    assert [one.token_id for one in _verify(logits, params, (1, 0))] == [1, 0, 1]
    assert [one.token_id for one in _verify(logits, params, (1, 1))] == [1, 0]


def test_every_position_has_its_own_draw() -> None:
    logits = LOGITS.expand(6, -1)
    alone = [one.token_id for one in _drawn_one_by_one(logits)]
    drafts = (*alone[:3], (alone[3] + 1) % 4, alone[4])
    assert [one.token_id for one in _verify(logits, NEUTRAL, drafts)] == alone[:4]


def _drawn_one_by_one(logits: torch.Tensor) -> list[SampledToken]:
    info = SequenceInfo(0, (), torch.zeros(3, 0), 0, NEUTRAL, 5)
    sampler = SequenceSampler(info)
    return [sampler.choose(row, SampleTask(0, at)) for at, row in enumerate(logits)]
