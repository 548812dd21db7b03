"""From logits to tokens. Stateless: a draw depends on (seed, position) alone, so a request that is
preempted, retried or batched differently draws the same tokens from the same logits."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch

from vlm_serve.engine.plan import PromptLogprobs, Sampled, SampleTask

_FEW_LOGITS = 1 << 17
"""So many are searched faster by one thread than by several, which torch would wake."""
_REPORTED_AT_ONCE = 32
"""Rows of prompt log-probabilities whose softmax is in memory at once."""


def sample(logits: torch.Tensor, tasks: Sequence[SampleTask], rows: Sequence[int]) -> list[Sampled]:
    """Samples one token per task.

    Args:
        logits: float32 `[R, vocab]`.
        tasks: what to sample.
        rows: for each task its row of `logits` (several tasks may share one).
    """
    plain = [_is_plain_greedy(task) for task in tasks]
    best = _best(logits) if any(plain) else []
    if all(plain):
        return [Sampled(best[row], {}) for row in rows]
    return [
        Sampled(best[row], {}) if simple else _sample_one(logits[row], task)
        for task, row, simple in zip(tasks, rows, plain, strict=True)
    ]


def _best(logits: torch.Tensor) -> list[int]:
    """The largest of every row, the first of equals."""
    if logits.device.type == "cpu" and logits.numel() <= _FEW_LOGITS:
        few: list[int] = logits.numpy().argmax(-1).tolist()
        return few
    return torch.argmax(logits, dim=-1).tolist()


def _is_plain_greedy(task: SampleTask) -> bool:
    params = task.params
    return (
        params.temperature == 0
        and params.logprobs is None
        and not task.banned
        and task.constraint is None
        and not _has_penalties(task)
    )


def _has_penalties(task: SampleTask) -> bool:
    params = task.params
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or (params.repetition_penalty is not None and params.repetition_penalty != 1.0)
    )


def _sample_one(raw: torch.Tensor, task: SampleTask) -> Sampled:
    logits = raw
    if task.banned or task.constraint is not None or _has_penalties(task):
        logits = _changed(raw, task)
    token = int(torch.argmax(logits)) if task.params.temperature == 0 else _draw(logits, task)
    return Sampled(token, _top_logprobs(raw, token, task.params.logprobs))


def _changed(raw: torch.Tensor, task: SampleTask) -> torch.Tensor:
    """A row with all that the request changes in it; at least one token stays possible."""
    logits, constraint = raw.clone(), task.constraint
    if constraint is not None:
        constraint.bias(logits)
    _apply_penalties(logits, task)
    if task.banned:
        logits[list(task.banned)] = float("-inf")
    if constraint is not None:
        constraint.mask(logits, task.history)
        if bool(logits.max() == float("-inf")):
            logits = raw.clone()
            constraint.mask_at_least(logits)
    return logits


def _apply_penalties(logits: torch.Tensor, task: SampleTask) -> None:
    """Penalties as in OpenAI's API (presence, frequency: generated tokens) and Keskar et al. 2019
    (repetition: prompt and generated tokens)."""
    params = task.params
    repetition = params.repetition_penalty
    if repetition is not None and repetition != 1.0:
        seen = list({*task.prompt_token_ids, *task.history})
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / repetition, values * repetition)
    if (params.presence_penalty or params.frequency_penalty) and task.history:
        counts = Counter(task.history)
        weights = [
            params.presence_penalty + params.frequency_penalty * count for count in counts.values()
        ]
        logits[list(counts)] -= torch.tensor(weights, dtype=logits.dtype, device=logits.device)


def _draw(logits: torch.Tensor, task: SampleTask) -> int:
    params = task.params
    assert params.temperature is not None
    scaled = logits / params.temperature
    if params.top_k is not None and 0 < params.top_k < scaled.numel():
        kept, ids = torch.topk(scaled, params.top_k)
    else:
        kept, ids = torch.sort(scaled, descending=True)
    probs = torch.softmax(kept.double(), dim=-1)
    if params.top_p is not None and params.top_p < 1.0:
        # A token stays while the mass before it is below top_p: the first one always does.
        probs = torch.where(probs.cumsum(0) - probs < params.top_p, probs, 0.0)
    if params.min_p > 0.0:
        probs = torch.where(probs >= params.min_p * probs[0], probs, 0.0)
    cumulative = probs.cumsum(0)
    threshold = uniform(task.seed, len(task.history)) * float(cumulative[-1])
    position = int(torch.searchsorted(cumulative, threshold, right=True))
    last_possible = int(torch.count_nonzero(probs)) - 1
    return int(ids[min(position, last_possible)])


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) that belongs to (seed, position)."""
    message = f"{seed}:{position}".encode()
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _top_logprobs(raw: torch.Tensor, token: int, count: int | None) -> dict[int, float]:
    if count is None:
        return {}
    logprobs = torch.log_softmax(raw.float(), dim=-1)
    result = {token: float(logprobs[token])}
    if count:
        values, ids = torch.topk(logprobs, min(count, logprobs.numel()))
        for token_id, value in zip(ids.tolist(), values.tolist(), strict=True):
            result.setdefault(token_id, value)
    return result


def prompt_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], count: int
) -> list[PromptLogprobs]:
    """Reports prompt tokens.

    Args:
        logits: float32 `[R, vocab]`, each given everything before the token of its row.
        token_ids: the R tokens.
        count: how many of the most likely tokens to report besides.
    """
    reports: list[PromptLogprobs] = []
    for first in range(0, len(token_ids), _REPORTED_AT_ONCE):
        own = list(token_ids[first : first + _REPORTED_AT_ONCE])
        rows = torch.log_softmax(logits[first : first + len(own)].float(), dim=-1)
        chosen = rows.gather(1, torch.tensor(own, device=rows.device)[:, None])
        ranks = ((rows > chosen).sum(dim=-1) + 1).tolist()
        values, ids = torch.topk(rows, min(count, rows.shape[1]), dim=-1)
        columns = zip(own, chosen[:, 0].tolist(), ranks, ids.tolist(), values.tolist(), strict=True)
        for token, value, rank, others, theirs in columns:
            found = {token: value}
            for other, its in zip(others, theirs, strict=True):
                found.setdefault(other, its)
            reports.append(PromptLogprobs(found, rank))
    return reports
