"""Samples tokens from logits.

A draw depends on (seed, position) alone. So a request that is preempted, retried or batched
differently draws the same tokens from the same logits.

A GPU samples many rows at once, see `row_sampling`: few launches and one wait.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from vlm_serve.engine.requests.plan import SampledToken, SampleTask, SequenceInfo
from vlm_serve.engine.steps.row_sampling import choose_tasks
from vlm_serve.engine.steps.token_counts import TokenCounts
from vlm_serve.kernels.sampling.reference import UNSOUND
from vlm_serve.kernels.sampling.row_sums import log_softmax, running_sum

_FEW_LOGITS = 1 << 17
"""Up to this many logits, one thread searches faster than several, which torch would wake."""
LEAST_MASS = 1e-300
"""Stands for a `top_p` of 0: less than the mass of any likeliest token."""


def sample(
    logits: torch.Tensor,
    tasks: Sequence[SampleTask],
    samplers: Mapping[int, SequenceSampler],
    rows: Sequence[int],
    best: Sequence[int] | None = None,
    counts: TokenCounts | None = None,
) -> dict[int, tuple[SampledToken, ...]]:
    """Sample a token per task; skip those behind a draft that was not sampled.

    Args:
        logits: float32 `[R, vocab]`.
        tasks: tasks; those of a sequence in order.
        samplers: samplers by sequence.
        rows: row of `logits` for each task (several tasks may share one).
        best: index of each row's first maximum, if known.
        counts: of penalised sequences, on a GPU.

    Returns:
        Tokens of each sequence; `UNSOUND` is the last one where a row holds NaN or infinity.
    """
    sampled: dict[int, tuple[SampledToken, ...]] = {}
    ended: set[int] = set()
    together = at_once(logits)
    ready = _together(logits, tasks, samplers, rows, counts) if together else {}
    best = None if best is None else _sound_ones(logits, np.asarray(best))
    for place, (task, row) in enumerate(zip(tasks, rows, strict=True)):
        if task.sequence in ended:
            continue
        sampler = samplers[task.sequence]
        if place in ready:
            one = ready[place]
        elif together:  # It comes behind a draft, of which the penalties have heard by now.
            (found,) = choose_tasks(logits, [task], samplers, [row], counts).read()
            one = SampledToken(*found)
        elif sampler.is_plain and task.mask is None and not task.unbiased:
            best = _best(logits) if best is None else best
            one = SampledToken(best[row], {})
        else:
            one = sampler.choose(logits[row], task)
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
    counts: TokenCounts | None,
) -> dict[int, SampledToken]:
    """Sample the tasks that need no other's token, by their places in the list.

    Those are all but the ones behind a draft in a sequence with penalties.
    """
    places, begun = list[int](), set[int]()
    for place, task in enumerate(tasks):
        if task.sequence not in begun or not samplers[task.sequence].is_penalised:
            places.append(place)
        begun.add(task.sequence)
    if not places:
        return {}
    asked, lines = [tasks[place] for place in places], [rows[place] for place in places]
    chosen = choose_tasks(logits, asked, samplers, lines, counts).read()
    return {place: SampledToken(*one) for place, one in zip(places, chosen, strict=True)}


def best_rows(logits: torch.Tensor, best: Sequence[int] | None) -> list[int]:
    """Return the index of each row's maximum, `UNSOUND` where it is no number.

    Args:
        logits: float32 `[R, vocab]`.
        best: the indices, if they are known; on the host.
    """
    if best is not None:
        return _sound_ones(logits, np.asarray(best))
    if at_once(logits):
        return choose_tasks(logits, [], {}, range(len(logits))).tokens()
    return _best(logits)


def _best(logits: torch.Tensor) -> list[int]:
    """Return the index of each row's maximum, the first one in a tie; `UNSOUND` if that is NaN, as
    one NaN makes it, or infinite."""
    if logits.device.type == "cpu" and logits.numel() <= _FEW_LOGITS:
        return _sound_ones(logits, logits.numpy().argmax(-1))
    found = torch.argmax(logits, dim=-1)
    sound = logits.gather(1, found[:, None])[:, 0].isfinite()
    return torch.where(sound, found, UNSOUND).tolist()


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
        sequence, prompt, generated, unchanged: see `Counted`.
        logprobs, named, bias, top_k: see `RowParams`.
    """

    def __init__(self, info: SequenceInfo) -> None:
        params = info.params
        self.sequence, self._params, self._seed = info.sequence, params, info.seed
        self._repetition = params.repetition_penalty or 1.0
        self.is_penalised = bool(
            params.presence_penalty or params.frequency_penalty or self._repetition != 1.0
        )
        self._changes = self.is_penalised or bool(params.logit_bias)
        self.is_plain = not self._changes and params.temperature == 0 and params.logprobs is None
        self.prompt = frozenset(info.token_ids if self.is_penalised else ())
        self.generated: list[int] = []
        self.unchanged = 0
        self.logprobs, self.top_k = params.logprobs, params.top_k or 0
        self.named = params.logprob_token_ids
        self.bias = tuple(sorted((params.logit_bias or {}).items()))
        self._counts: Counter[int] = Counter()
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
        assert first <= len(self.generated), "generated tokens are missing"
        gone = self.generated[first:]
        self.generated[first:] = token_ids
        pairs = enumerate(zip(gone, token_ids, strict=False))
        same = next((at for at, (old, new) in pairs if old != new), min(len(gone), len(token_ids)))
        if same < len(gone):
            self.unchanged = min(self.unchanged, first + same)
        self._counts.subtract(gone)
        self._counts.update(token_ids)
        if self._tables is not None:
            self._note(self._tables, {*gone, *token_ids})

    def note(self, position: int, token_id: int) -> None:
        """Take a sampled token at its index, unless it is `UNSOUND` or one before it failed."""
        if token_id >= 0 and position <= len(self.generated):
            self.replace(position, (token_id,))

    def choose(self, raw: torch.Tensor, task: SampleTask) -> SampledToken:
        """Sample one token from the model's logits, float32 `[vocab]`; the logits stay
        unchanged."""
        if not np.isfinite(_largest(raw)):
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
        return SampledToken(token, self._reported(raw, token))

    def numbers(self, position: int) -> tuple[float, ...]:
        """Return the numbers of a row, see `kernels.sampling.Rows`."""
        params = self._params
        temperature, top_p = params.temperature or 0.0, params.top_p
        return (
            temperature,
            2.0 if top_p is None or top_p >= 1.0 else max(top_p, LEAST_MASS),
            params.min_p,
            uniform(self._seed, position) if temperature else 0.0,
            self._repetition,
            params.presence_penalty,
            params.frequency_penalty,
            0.0,
        )

    def forced(self, raw: torch.Tensor, token: int, drawn: int) -> SampledToken:
        """Return the forced token, with the token that was drawn instead."""
        return SampledToken(token, self._reported(raw, token), drawn)

    def _reported(self, raw: torch.Tensor, token: int) -> dict[int, float]:
        """Return the requested log-probabilities: of the token, the likeliest and the named."""
        if self.logprobs is None:
            return {}
        logprobs = log_softmax(raw)
        likeliest = min(self.logprobs, logprobs.numel())
        ids = [token, *(torch.topk(logprobs, likeliest).indices.tolist() if likeliest else ())]
        ids = list(dict.fromkeys([*ids, *self.named]))
        return dict(zip(ids, logprobs[ids].tolist(), strict=True))

    def _changed(self, raw: torch.Tensor) -> torch.Tensor:
        """Apply biases and penalties to a row. Penalties follow OpenAI's API (presence, frequency:
        generated tokens) and Keskar et al. 2019 (repetition: prompt and generated tokens)."""
        params, logits = self._params, raw
        if self.bias:
            if self._biased is None:
                ids, values = zip(*self.bias, strict=True)
                self._biased = (
                    torch.tensor(ids, device=raw.device),
                    torch.tensor([float(value) for value in values], device=raw.device),
                )
            logits = raw.clone()
            logits[self._biased[0]] += self._biased[1]
        if self.is_penalised and self._tables is None:
            self._tables = torch.stack((torch.zeros_like(raw), torch.ones_like(raw)))
            self._note(self._tables, {*self.prompt, *self._counts})
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
            self._repetition if count > 0 or token in self.prompt else 1.0
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
