"""Samples tokens from logits.

A draw depends on (seed, position) alone. So a request that is preempted, retried or batched
differently draws the same tokens from the same logits.

A GPU samples many rows at once, by a fixed number of launches and one wait. A row's token depends
on its own logits and parameters alone, whatever rows are beside it. Equal logits keep the order of
their ids, and sums are those of whole numbers, which have no order.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vlm_serve.engine.requests.plan import SampledToken, SampleTask, SequenceInfo
from vlm_serve.kernels.sampling.row_sums import log_softmax, running_sum, whole_sums
from vlm_serve.sampling_params import SamplingParams

_FEW_LOGITS = 1 << 17
"""Up to this many logits, one thread searches faster than several, which torch would wake."""
UNSOUND = -1
"""Stands for the token of a row whose logits are no finite numbers: none can be sampled."""
LEAST_MASS = 1e-300
"""Stands for a `top_p` of 0: less than the mass of any likeliest token."""
_UNITS = 2.0**40
"""Units of the likeliest token's weight: sums of 2^22 such weights are exact in int64."""


def sample(
    logits: torch.Tensor,
    tasks: Sequence[SampleTask],
    samplers: Mapping[int, SequenceSampler],
    rows: Sequence[int],
    best: Sequence[int] | None = None,
) -> dict[int, tuple[SampledToken, ...]]:
    """Sample a token per task; skip those behind a draft that was not sampled.

    Args:
        logits: float32 `[R, vocab]`.
        tasks: tasks; those of a sequence in order.
        samplers: samplers by sequence.
        rows: row of `logits` for each task (several tasks may share one).
        best: index of each row's first maximum, if known.

    Returns:
        Tokens of each sequence; `UNSOUND` is the last one where a row holds NaN or infinity.
    """
    sampled: dict[int, tuple[SampledToken, ...]] = {}
    ended: set[int] = set()
    ready = _together(logits, tasks, samplers, rows) if at_once(logits) else {}
    best = None if best is None else _sound_ones(logits, np.asarray(best))
    for place, (task, row) in enumerate(zip(tasks, rows, strict=True)):
        if task.sequence in ended:
            continue
        sampler = samplers[task.sequence]
        if sampler.is_plain and task.mask is None and not task.unbiased:
            best = _best(logits) if best is None else best
            one = SampledToken(best[row], {})
        else:
            one = ready.get(place) or sampler.choose(logits[row], task)
        if one.token_id == UNSOUND:
            ended.add(task.sequence)
        elif task.forced is not None and task.forced != one.token_id:
            one = sampler.forced(logits[row], task.forced, one.token_id)
        sampled[task.sequence] = (*sampled.get(task.sequence, ()), one)
        if task.draft is not None and one.token_id == task.draft:
            sampler.replace(task.position, (task.draft,))
        elif task.draft is not None:
            ended.add(task.sequence)
    return sampled


def at_once(logits: torch.Tensor) -> bool:
    """Return True if rows are sampled together: on a GPU, where the host waits for each of them."""
    return logits.device.type != "cpu"


def _together(
    logits: torch.Tensor,
    tasks: Sequence[SampleTask],
    samplers: Mapping[int, SequenceSampler],
    rows: Sequence[int],
) -> dict[int, SampledToken]:
    """Sample the tasks that need no other's token, by their places in the list.

    Those are all but the ones behind a draft in a sequence with penalties.
    """
    places, asked, begun = list[int](), list[SamplingRow](), set[int]()
    for place, (task, row) in enumerate(zip(tasks, rows, strict=True)):
        sampler, first = samplers[task.sequence], task.sequence not in begun
        begun.add(task.sequence)
        plain = sampler.is_plain and task.mask is None and not task.unbiased
        if not plain and (first or not sampler.is_penalised):
            places.append(place)
            asked.append(sampler.row(logits[row], task))
    if not asked:
        return {}
    chosen = choose_rows(asked).read()
    return {place: SampledToken(*one) for place, one in zip(places, chosen, strict=True)}


def best_rows(logits: torch.Tensor, best: Sequence[int] | None) -> list[int]:
    """Return the index of each row's maximum, `UNSOUND` where it is no number.

    Args:
        logits: float32 `[R, vocab]`.
        best: the indices, if they are known; on the host.
    """
    return _best(logits) if best is None else _sound_ones(logits, np.asarray(best))


def _best(logits: torch.Tensor) -> list[int]:
    """Return the index of each row's maximum, the first one in a tie; `UNSOUND` if that is NaN, as
    one NaN makes it, or infinite."""
    if logits.device.type == "cpu" and logits.numel() <= _FEW_LOGITS:
        return _sound_ones(logits, logits.numpy().argmax(-1))
    return _best_on_device(logits, range(len(logits))).tolist()


def _sound_ones(logits: torch.Tensor, best: npt.NDArray[np.int64]) -> list[int]:
    """Return the index of each row's maximum on the host, `UNSOUND` where it is no number."""
    sound = np.isfinite(logits.numpy()[np.arange(len(best)), best])
    found: list[int] = np.where(sound, best, UNSOUND).tolist()
    return found


class SequenceSampler:
    """Samples the tokens of one sequence.

    The penalties' tables cover the vocabulary, so the cost of a token does not depend on its
    position.

    Attributes:
        is_penalised: True if earlier tokens change the logits.
        is_plain: True for greedy sampling without changes to the logits (other than masks) and
            without log-probabilities.
    """

    def __init__(self, info: SequenceInfo) -> None:
        params = info.params
        self._params, self._seed = params, info.seed
        self._repetition = params.repetition_penalty or 1.0
        self.is_penalised = bool(
            params.presence_penalty or params.frequency_penalty or self._repetition != 1.0
        )
        self._changes = self.is_penalised or bool(params.logit_bias)
        self.is_plain = not self._changes and params.temperature == 0 and params.logprobs is None
        self._prompt = frozenset(info.token_ids if self.is_penalised else ())
        self._generated: list[int] = []
        self._counts: Counter[int] = Counter()
        self._bias = tuple((params.logit_bias or {}).items())
        self._biased: tuple[torch.Tensor, torch.Tensor] | None = None
        """Ids and float32 values of `logit_bias`, on the device of the logits."""
        self._tables: torch.Tensor | None = None
        """float32 `[2, vocab]`, created with the first token. Row 0 is subtracted from each logit
        (presence and frequency); row 1 divides positive logits and multiplies negative ones
        (repetition)."""

    def replace(self, first: int, token_ids: Sequence[int]) -> None:
        """Replace the generated tokens from index `first` on."""
        if not self.is_penalised:
            return
        assert first <= len(self._generated), "generated tokens are missing"
        gone = self._generated[first:]
        self._generated[first:] = token_ids
        self._counts.subtract(gone)
        self._counts.update(token_ids)
        if self._tables is not None:
            self._note(self._tables, {*gone, *token_ids})

    def choose(self, raw: torch.Tensor, task: SampleTask) -> SampledToken:
        """Sample one token from the model's logits, float32 `[vocab]`; the logits stay
        unchanged."""
        if not at_once(raw) and not np.isfinite(_largest(raw)):
            return SampledToken(UNSOUND, {})
        logits = self._changed(raw) if self._changes and not task.unbiased else raw
        if task.mask is not None:
            bits = np.frombuffer(task.mask, dtype=np.uint8)
            allowed = np.unpackbits(bits, count=raw.shape[-1], bitorder="little").view(bool)
            logits = logits.where(torch.from_numpy(allowed).to(raw.device), float("-inf"))
        greedy = self._params.temperature == 0
        token = _best(logits[None])[0] if greedy else self._draw(logits, task.position)
        if token == UNSOUND:
            return SampledToken(UNSOUND, {})
        return SampledToken(token, _top_logprobs(raw, token, self._params.logprobs))

    def row(self, raw: torch.Tensor, task: SampleTask) -> SamplingRow:
        """Return what `choose` would sample, for `choose_rows`."""
        changed = self._changed(raw) if self._changes and not task.unbiased else raw
        draw = uniform(self._seed, task.position)
        return SamplingRow(raw, changed, task.mask, self._params, draw)

    def forced(self, raw: torch.Tensor, token: int, drawn: int) -> SampledToken:
        """Return the forced token, with the token that was drawn instead."""
        return SampledToken(token, _top_logprobs(raw, token, self._params.logprobs), drawn)

    def _changed(self, raw: torch.Tensor) -> torch.Tensor:
        """Apply biases and penalties to a row. Penalties follow OpenAI's API (presence, frequency:
        generated tokens) and Keskar et al. 2019 (repetition: prompt and generated tokens)."""
        params, logits = self._params, raw
        if self._bias:
            if self._biased is None:
                ids, values = zip(*self._bias, strict=True)
                self._biased = (
                    torch.tensor(ids, device=raw.device),
                    torch.tensor([float(value) for value in values], device=raw.device),
                )
            logits = raw.clone()
            logits[self._biased[0]] += self._biased[1]
        if self.is_penalised and self._tables is None:
            self._tables = torch.stack((torch.zeros_like(raw), torch.ones_like(raw)))
            self._note(self._tables, {*self._prompt, *self._counts})
        if self._tables is not None and self._repetition != 1.0:
            # Each logit is divided or multiplied and then added to 0: exact, and without a branch.
            factors = self._tables[1]
            logits = (logits.clamp(min=0) / factors).add_(logits.clamp(max=0).mul_(factors))
        if self._tables is not None and (params.presence_penalty or params.frequency_penalty):
            logits = logits - self._tables[0]
        return logits

    def _note(self, tables: torch.Tensor, changed: set[int]) -> None:
        """Update the tables for tokens with changed counts."""
        presence, frequency = self._params.presence_penalty, self._params.frequency_penalty
        ids = list(changed)
        counts = [self._counts[token] for token in ids]
        weights = [(presence + frequency * count) * (count > 0) for count in counts]
        factors = [
            self._repetition if count > 0 or token in self._prompt else 1.0
            for token, count in zip(ids, counts, strict=True)
        ]
        tables[:, ids] = torch.tensor([weights, factors], device=tables.device)

    def _draw(self, logits: torch.Tensor, position: int) -> int:
        params = self._params
        assert params.temperature is not None
        scaled = logits / params.temperature
        if params.top_k is not None and 0 < params.top_k < scaled.numel():
            kept, ids = torch.topk(scaled, params.top_k)
        else:
            kept, ids = torch.sort(scaled, descending=True)
        probs = torch.softmax(kept.double(), dim=-1)
        if params.top_p is not None and params.top_p < 1.0:
            # A token stays while the mass before it is below top_p, so the first one always stays.
            least = max(params.top_p, LEAST_MASS)
            probs = torch.where(running_sum(probs) - probs < least, probs, 0.0)
        if params.min_p > 0.0:
            probs = torch.where(probs >= params.min_p * probs[0], probs, 0.0)
        cumulative = running_sum(probs)
        mass, top = torch.stack((cumulative[-1], kept[0].double())).tolist()
        if not math.isfinite(top):  # NaN counts as the largest.
            return UNSOUND
        threshold = uniform(self._seed, position) * mass
        place = int(torch.searchsorted(cumulative, threshold, right=True))
        last_possible = int(torch.count_nonzero(probs)) - 1
        return int(ids[min(place, last_possible)])


def _largest(raw: torch.Tensor) -> float:
    """Return the maximum of a row on the host; NaN if there is one."""
    with np.errstate(invalid="ignore"):
        return float(raw.numpy().max())


def uniform(seed: int, position: int) -> float:
    """Return the draw in [0, 1) for (seed, position)."""
    message = f"{seed}:{position}".encode()
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _top_logprobs(raw: torch.Tensor, token: int, count: int | None) -> dict[int, float]:
    if count is None:
        return {}
    logprobs = log_softmax(raw)
    result = {token: float(logprobs[token])}
    if count:
        values, ids = torch.topk(logprobs, min(count, logprobs.numel()))
        for token_id, value in zip(ids.tolist(), values.tolist(), strict=True):
            result.setdefault(token_id, value)
    return result


@dataclass(frozen=True, slots=True)
class SamplingRow:
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


class Chosen(NamedTuple):
    """Tokens of rows and their requested log-probabilities, on the device or on the host.

    Attributes:
        tokens: int64 `[R]`; `UNSOUND` for a row with NaN or infinity.
        asked: rows whose log-probabilities are requested, each with their number.
        ids, values: int64 and float32, of each such row: its token and the most likely ones; None
            if there is no such row.
    """

    tokens: torch.Tensor
    asked: tuple[tuple[int, int], ...] = ()
    ids: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def mapped(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Chosen:
        """Return the same with copies of all tensors."""
        ids, values = self.ids, self.values
        return Chosen(
            copy(self.tokens),
            self.asked,
            None if ids is None else copy(ids),
            None if values is None else copy(values),
        )

    def read(self) -> list[tuple[int, dict[int, float]]]:
        """Return token and report of each row; waits for a device."""
        tokens: list[int] = self.tokens.tolist()
        reports = [dict[int, float]() for _ in tokens]
        if self.ids is not None and self.values is not None:
            rows = zip(self.asked, self.ids.tolist(), self.values.tolist(), strict=True)
            for (place, count), row_ids, row_values in rows:
                for token, value in zip(row_ids[: 1 + count], row_values, strict=False):
                    reports[place].setdefault(token, value)
        return list(zip(tokens, reports, strict=True))


def choose_tasks(
    logits: torch.Tensor,
    tasks: Sequence[SampleTask],
    samplers: Mapping[int, SequenceSampler],
    rows: Sequence[int],
) -> Chosen:
    """Sample a token for each task, none of which has a draft or a forced token, without a wait.

    Args:
        logits, samplers: see `sample`.
        tasks: of the rows; none if each row's likeliest token is wanted.
        rows: row of `logits` for each task.
    """
    plain = [
        samplers[task.sequence].is_plain and task.mask is None and not task.unbiased
        for task in tasks
    ]
    if all(plain):
        return Chosen(_best_on_device(logits, rows))
    places = [place for place, is_plain in enumerate(plain) if not is_plain]
    chosen = choose_rows(
        [samplers[tasks[place].sequence].row(logits[rows[place]], tasks[place]) for place in places]
    )
    if len(places) == len(tasks):
        return chosen
    tokens = _best_on_device(logits, rows)
    tokens[_index(places, logits.device)] = chosen.tokens
    asked = tuple([(places[place], count) for place, count in chosen.asked])
    return chosen._replace(tokens=tokens, asked=asked)


def _best_on_device(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return int64, the index of the maximum of each given row; `UNSOUND` if it is no number."""
    found = torch.argmax(logits, dim=-1)
    sound = logits.gather(1, found[:, None])[:, 0].isfinite()
    found = torch.where(sound, found, UNSOUND)
    in_order = len(rows) == len(logits) and all(map(int.__eq__, rows, range(len(rows))))
    return found if in_order else found[_index(rows, logits.device)]


def choose_rows(rows: Sequence[SamplingRow]) -> Chosen:
    """Return the token of each row and its requested log-probabilities, without a wait."""
    changed = torch.stack([row.changed for row in rows])
    sound = changed.amax(-1).isfinite()  # The maximum of a row with NaN is NaN.
    logits = _masked(changed, [row.mask for row in rows])
    tokens = torch.argmax(logits, dim=-1)
    drawn = [place for place, row in enumerate(rows) if row.params.temperature != 0]
    if drawn:
        chosen = [rows[place] for place in drawn]
        params = [row.params for row in chosen]
        drawn_logits = logits if len(drawn) == len(rows) else logits[_index(drawn, logits.device)]
        drawn_tokens = draw_rows(drawn_logits, params, [row.uniform for row in chosen])
        tokens[_index(drawn, logits.device)] = drawn_tokens
    asked = [place for place, row in enumerate(rows) if row.params.logprobs is not None]
    ended = torch.where(sound, tokens, UNSOUND)
    if not asked:
        return Chosen(ended)
    logprobs = log_softmax(torch.stack([rows[place].raw for place in asked]))
    counts = [rows[place].params.logprobs or 0 for place in asked]
    own = tokens[_index(asked, logits.device)][:, None]
    values, ids = torch.topk(logprobs, min(max(counts), logprobs.shape[1]), dim=1)
    return Chosen(
        ended,
        tuple(zip(asked, counts, strict=True)),
        torch.cat((own, ids), 1),
        torch.cat((logprobs.gather(1, own), values), 1),
    )


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
    kept = [row.top_k if row.top_k and 0 < row.top_k < vocab else vocab for row in params]
    table = [
        (
            row.temperature or 1.0,
            count,
            # A token stays while the mass before it is below top_p, so the first one always stays.
            max(row.top_p, LEAST_MASS) if row.top_p is not None and row.top_p < 1.0 else 2.0,
            row.min_p,
            draw,
        )
        for row, count, draw in zip(params, kept, uniforms, strict=True)
    ]
    numbers = to_device(torch.tensor(table, dtype=torch.float64), logits.device)
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
    places = places.clamp(min=0)  # With NaN no token is left, and a GPU would stop for good.
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
    return logits.where(to_device(torch.from_numpy(allowed), logits.device), float("-inf"))


def _index(places: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(places), device)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor's copy on a device, which nothing waits for: a pageable copy would wait
    for all that is queued."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
