"""Sampling by torch: the rule that the kernels follow."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vlm_serve.kernels.sampling.row_sums import log_softmax, whole_sums

PROMPT = 1 << 30
"""Added to the count of a token that the prompt has."""
UNSOUND = -1
"""Stands for the token of a row whose logits are no finite numbers: none can be sampled."""
UNITS = 2.0**40
"""Units of the likeliest token's weight: sums of 2^22 such weights are exact in int64."""


class Rows(NamedTuple):
    """Inputs of sampling, on the device of the logits.

    Attributes:
        numbers: float64 `[R, 8]`: temperature, top_p (2 for none), min_p, draw in [0, 1),
            repetition penalty, presence penalty, frequency penalty.
        marks: int32 `[R, 12]`, see `Mark`.
        masks: uint8 `[M, bytes]`: bit `i % 8` of byte `i // 8` allows token i.
        bias_ids, bias_values: int32 and float32, by rows, ascending ids.
        before: int64 `[tokens]`, the newest token of each row that the host does not know.
    """

    numbers: torch.Tensor
    marks: torch.Tensor
    masks: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    before: torch.Tensor


class Found(NamedTuple):
    """Places of results.

    Attributes:
        tokens: int32 `[2, S, 1 + most]`, of the S rows that are no reports: token (`UNSOUND`
            without one), then the ids of its report, the likeliest first, and those of its named
            tokens; below them the bits of their float32 log-probabilities.
        following: int64 `[>= S]`: the tokens again, 0 for `UNSOUND`.
    """

    tokens: torch.Tensor
    following: torch.Tensor


def sample_rows(
    logits: torch.Tensor,
    rows: Rows,
    counts: torch.Tensor,
    into: Found,
    *,
    draws: bool = True,
    unlimited: bool = True,
) -> None:
    """Sample rows, see `kernels.sampling.sample_rows`."""
    own, values = into.tokens[0], into.tokens[1].view(torch.float32)
    numbers = rows.numbers.tolist()
    drawn, counted = list[tuple[int, torch.Tensor]](), list[tuple[int, int]]()
    for row, mark in enumerate(rows.marks.tolist()):
        line, kind, top_k, slot, newest, mask, first, end, told, changed = mark[:10]
        if kind == 2:
            logprobs = log_softmax(logits[line])
            best, ids = torch.sort(logprobs, descending=True, stable=True)
            own[told, 1 : 1 + top_k], values[told, 1 : 1 + top_k] = ids[:top_k], best[:top_k]
            continue
        newest = int(rows.before[row]) if newest == -2 else newest
        scaled = logits[line]
        if changed:
            scaled = _changed(scaled, rows, (first, end), numbers[row], counts, (slot, newest))
        if slot >= 0 and newest >= 0:
            counted.append((slot, newest))
        own[row, 0] = torch.argmax(_masked(scaled, rows, mask))
        if not scaled.amax().isfinite():  # The maximum of a row with NaN is NaN.
            own[row, 0] = UNSOUND
        elif kind == 1:
            drawn.append((row, _masked(scaled, rows, mask)))
    if drawn:
        places = [row for row, _ in drawn]
        own[places, 0] = draw_rows(
            torch.stack([each for _, each in drawn]),
            rows.numbers[places],
            rows.marks[places, 2].long(),
        ).int()
    for row, mark in enumerate(rows.marks[: len(own)].tolist()):
        line, told, (first, end) = mark[0], mark[8], mark[10:]
        if told:
            logprobs, place = log_softmax(logits[line]), slice(told, told + end - first)
            values[row, 0] = logprobs[max(0, int(own[row, 0]))]
            own[row, place] = rows.bias_ids[first:end]
            values[row, place] = logprobs[own[row, place].long()]
    into.following[: len(own)] = own[:, 0].clamp(min=0)
    for slot, token in counted:
        counts[slot, token] += 1


def _masked(logits: torch.Tensor, rows: Rows, mask: int) -> torch.Tensor:
    if mask < 0:
        return logits
    bits = rows.masks[mask, :, None] >> torch.arange(8, device=logits.device)
    return logits.where((bits.flatten()[: len(logits)] & 1).bool(), float("-inf"))


def _changed(
    logits: torch.Tensor,
    rows: Rows,
    biases: tuple[int, int],
    numbers: list[float],
    counts: torch.Tensor,
    counted: tuple[int, int],
) -> torch.Tensor:
    """Return a row with its biases and penalties."""
    (first, end), (slot, newest) = biases, counted
    repetition, presence, frequency = numbers[4:7]
    if end > first:
        logits = logits.clone()
        logits[rows.bias_ids[first:end].long()] += rows.bias_values[first:end]
    if slot < 0:
        return logits
    own = counts[slot].clone()
    if newest >= 0:
        own[newest] += 1
    generated = own & (PROMPT - 1)
    factors = torch.where(own > 0, repetition, 1.0).float()
    # Each logit is divided or multiplied and then added to 0: exact, and without a branch.
    logits = (logits.clamp(min=0) / factors).add_(logits.clamp(max=0).mul_(factors))
    weights = (presence + frequency * generated.double()) * (generated > 0)
    return logits - weights.float()


def draw_rows(logits: torch.Tensor, numbers: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Draw a token of each row.

    Args:
        logits: float32 `[R, vocab]`, with biases, penalties and masks.
        numbers, top_k: of each row, see `Rows` and `Mark`; temperatures above 0.

    Returns:
        int64 `[R]`.
    """
    vocab = logits.shape[1]
    count = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)[:, None]
    temperature, top_p, min_p, draws = numbers[:, :4, None].unbind(1)
    scaled = logits / temperature.float()
    values = torch.sort(scaled, dim=1, descending=True).values
    inside = torch.arange(vocab, device=logits.device) < count
    wide = values.double()
    weights = torch.where(inside, torch.exp(wide - wide[:, :1]), 0.0)
    total = (weights * UNITS).long().sum(1, keepdim=True).double() / UNITS
    probs = weights / total
    # A token stays while the mass before it is below top_p, so the first one always stays.
    probs = torch.where(whole_sums(probs) - probs < top_p, probs, 0.0)
    probs = torch.where(probs >= min_p * probs[:, :1], probs, 0.0)
    cumulative = whole_sums(probs)
    places = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    places = torch.minimum(places, torch.count_nonzero(probs, dim=1)[:, None] - 1)
    places = places.clamp(min=0)  # With NaN no token is left.
    value = values.gather(1, places)
    before = (values == value) & (torch.arange(vocab, device=logits.device) < places)
    equal = scaled == value
    ranks = equal.long().cumsum(1)
    wanted = equal & (ranks == before.sum(1, keepdim=True) + 1)
    return wanted.long().argmax(1)
