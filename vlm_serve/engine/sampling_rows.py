"""Samples tokens of many rows at once, as a GPU needs it: a fixed number of launches, one wait.

A row's token depends on its own logits and parameters alone, whatever rows are beside it. Equal
logits keep the order of their ids, and sums are those of whole numbers, which have no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vlm_serve.engine.row_sums import log_softmax, whole_sums
from vlm_serve.sampling_params import SamplingParams

LEAST_MASS = 1e-300
"""Stands for a `top_p` of 0: less than the mass of any likeliest token."""
_UNITS = 2.0**40
"""Units of the likeliest token's weight: sums of 2^22 such weights are exact in int64."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is sampled of a row.

    Attributes:
        raw: the model's logits, float32 `[vocab]`.
        changed: the same with biases and penalties.
        mask: allowed tokens, as `SampleTask` has them; None allows all.
        params: of the sequence.
        uniform: draw in [0, 1).
    """

    raw: torch.Tensor
    changed: torch.Tensor
    mask: bytes | None
    params: SamplingParams
    uniform: float


def choose_rows(rows: Sequence[Row]) -> list[tuple[int, dict[int, float]]]:
    """Return the token of each row and its requested log-probabilities."""
    logits = _masked(torch.stack([row.changed for row in rows]), [row.mask for row in rows])
    tokens = torch.argmax(logits, dim=-1)
    drawn = [place for place, row in enumerate(rows) if row.params.temperature != 0]
    if drawn:
        chosen = [rows[place] for place in drawn]
        params = [row.params for row in chosen]
        own = logits if len(drawn) == len(rows) else logits[_index(drawn, logits.device)]
        found = draw_rows(own, params, [row.uniform for row in chosen])
        tokens[_index(drawn, logits.device)] = found
    asked = [place for place, row in enumerate(rows) if row.params.logprobs is not None]
    if not asked:
        return [(token, {}) for token in tokens.tolist()]
    logprobs = log_softmax(torch.stack([rows[place].raw for place in asked]))
    counts = [rows[place].params.logprobs or 0 for place in asked]
    reports = _reports(logprobs, tokens[_index(asked, logits.device)], counts)
    found_reports = dict(zip(asked, reports, strict=True))
    return [(token, found_reports.get(place, {})) for place, token in enumerate(tokens.tolist())]


def draw_rows(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> torch.Tensor:
    """Draw a token of each row.

    Args:
        logits: float32 `[R, vocab]`, with biases, penalties and masks.
        params: of each row; temperatures above 0.
        uniforms: draw in [0, 1) of each row.

    Returns:
        int64 `[R]`.
    """
    vocab = logits.shape[1]
    kept = [each.top_k if each.top_k and 0 < each.top_k < vocab else vocab for each in params]
    table = [
        (
            each.temperature or 1.0,
            count,
            # A token stays while the mass before it is below top_p, so the first one always stays.
            max(each.top_p, LEAST_MASS) if each.top_p is not None and each.top_p < 1.0 else 2.0,
            each.min_p,
            draw,
        )
        for each, count, draw in zip(params, kept, uniforms, strict=True)
    ]
    numbers = torch.tensor(table, dtype=torch.float64).to(logits.device)
    temperature, count, top_p, min_p, draws = numbers.unsqueeze(2).unbind(1)
    scaled = logits / temperature.float()
    most = max(kept)
    # Values alone: which of equal ones is meant is decided by their ids, below.
    if most < vocab:
        values = torch.topk(scaled, most, dim=1).values
    else:
        values = torch.sort(scaled, dim=1, descending=True).values
    inside = torch.arange(most, device=logits.device) < count
    wide = values.double()
    weights = torch.where(inside, torch.exp(wide - wide[:, :1]), 0.0)
    total = (weights * _UNITS).long().sum(1, keepdim=True).double() / _UNITS
    probs = weights / total
    probs = torch.where(whole_sums(probs) - probs < top_p, probs, 0.0)
    probs = torch.where(probs >= min_p * probs[:, :1], probs, 0.0)
    cumulative = whole_sums(probs)
    places = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    places = torch.minimum(places, torch.count_nonzero(probs, dim=1)[:, None] - 1)
    value = values.gather(1, places)
    before = (values == value) & (torch.arange(most, device=logits.device) < places)
    equal = scaled == value
    ranks = equal.long().cumsum(1)
    wanted = equal & (ranks == before.sum(1, keepdim=True) + 1)
    return wanted.long().argmax(1)


def _masked(logits: torch.Tensor, masks: Sequence[bytes | None]) -> torch.Tensor:
    """Return logits with -inf where a row's mask forbids; all masks travel together."""
    places = [place for place, mask in enumerate(masks) if mask is not None]
    if not places:
        return logits
    allowed = np.ones((len(masks), logits.shape[1]), dtype=bool)
    for place in places:
        bits = np.frombuffer(masks[place] or b"", dtype=np.uint8)
        allowed[place] = np.unpackbits(bits, count=logits.shape[1], bitorder="little")
    return logits.where(torch.from_numpy(allowed).to(logits.device), float("-inf"))


def _reports(
    logprobs: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int]
) -> list[dict[int, float]]:
    """Return log-probabilities of each row's token and of its most likely ones."""
    most = min(max(counts), logprobs.shape[1])
    values, ids = torch.topk(logprobs, most, dim=1)
    own = logprobs.gather(1, tokens[:, None])
    all_ids = torch.cat((tokens[:, None], ids), 1).tolist()
    all_values = torch.cat((own, values), 1).tolist()
    reports = []
    for count, row_ids, row_values in zip(counts, all_ids, all_values, strict=True):
        report: dict[int, float] = {}
        for token, value in zip(row_ids[: 1 + count], row_values, strict=False):
            report.setdefault(token, value)
        reports.append(report)
    return reports


def _index(places: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(places).to(device)
