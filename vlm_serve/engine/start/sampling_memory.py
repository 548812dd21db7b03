"""A crowd's step of sampling, to be measured at start: the rows that take the most memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vlm_serve.engine.requests.plan import SampleTask, SequenceInfo
from vlm_serve.engine.steps.row_sampling import Chosen, prepare
from vlm_serve.engine.steps.sampler import SequenceSampler
from vlm_serve.engine.steps.token_counts import TokenCounts
from vlm_serve.sampling_params import SamplingParams


def crowd_of(logits: torch.Tensor, params: Sequence[SamplingParams]) -> Callable[[], Chosen]:
    """Return a function that samples the next token of as many sequences as there are rows.

    Args:
        logits: float32 `[R, vocab]`, on a GPU or "meta".
        params: of each sequence.
    """
    position, count = torch.zeros(3, 1, dtype=torch.int64), len(params)
    samplers = {
        row: SequenceSampler(SequenceInfo(row, (0,), position, 0, own, seed=row))
        for row, own in enumerate(params)
    }
    counts = TokenCounts(count, logits.device)
    following = torch.zeros(count, dtype=torch.int64, device=logits.device)
    steps = iter(range(1 << 30))

    def step() -> Chosen:
        at = next(steps)
        tasks = [SampleTask(row, at) for row in range(count)]
        before = following if at else None
        run = prepare(
            logits, tasks, samplers, range(count), counts, before=before, following=following
        )
        return run()

    return step


def fullest_crowd(logits: torch.Tensor, max_logprobs: int) -> Callable[[], Chosen]:
    """Return `crowd_of` sequences of which each asks for everything."""
    params = SamplingParams(
        temperature=1.0,
        top_p=0.9,
        presence_penalty=1.0,
        logit_bias={0: 1.0},
        logprobs=max_logprobs,
    )
    return crowd_of(logits, [params] * len(logits))
