"""What an executor keeps of a sequence, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vlm_serve.engine.requests.plan import SampleTask, SequenceInfo, Slice
from vlm_serve.engine.steps.batching import KnownSequence, make_batch
from vlm_serve.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, presence_penalty=1.0)
INFO = SequenceInfo(0, tuple(range(10)), torch.arange(30).view(3, 10), -4, PARAMS, 0)


def piece(start: int, end: int, tokens: tuple[int, ...], first: int, *blocks: int) -> Slice:
    return Slice(0, "prefill", tokens, start, end, -1, 0, first, blocks, 0)


def test_taking_a_slice_twice_changes_nothing() -> None:
    known = KnownSequence(INFO)
    known.take(piece(0, 10, (), 0, 7, 8, 9))
    item = piece(8, 12, (40, 41), 2, 5)
    known.take(item)
    for _ in range(2):
        assert known.table.tolist() == [7, 8, 5]
        assert known.sampler.generated == [40, 41]
        assert known.token_ids(item) == (8, 9, 40, 41)
        assert known.positions(8, 12).tolist() == [
            [8, 9, 6, 7],
            [18, 19, 6, 7],
            [28, 29, 6, 7],
        ]
        known.take(item)
    known.take(piece(11, 12, (50,), 0, 1))
    assert known.table.tolist() == [1] and known.sampler.generated == [40, 50]


def test_what_has_not_arrived_is_missed() -> None:
    known = KnownSequence(INFO)
    with pytest.raises(AssertionError, match="hole"):
        known.take(piece(0, 10, (), 1, 7))
    with pytest.raises(AssertionError, match="missing"):
        known.take(piece(11, 12, (40,), 0, 7))


def test_of_drafts_the_chooser_learns_only_what_is_certain() -> None:
    known = KnownSequence(INFO)
    known.take(Slice(0, "verify", (40, 41, 42), 10, 13, 0, 0, 0, (7, 8, 9, 10), 0))
    assert known.sampler.generated == [40]


def test_the_largest_logits_are_wanted_where_a_greedy_token_is() -> None:
    reported = piece(0, 10, (), 0, 7, 8, 9)
    sampled = replace(reported, samples=(SampleTask(0, 0),))
    for params, expected in ((SamplingParams(temperature=0.0), True), (PARAMS, False)):
        known = {0: KnownSequence(replace(INFO, params=params))}
        known[0].take(reported)
        assert not make_batch([reported], known, {}, 4)[0].greedy
        assert make_batch([sampled], known, {}, 4)[0].greedy == expected
