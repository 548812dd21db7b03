"""Samples rows together, on the device of their logits and without a wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vlm_serve.engine.requests.plan import SampleTask
from vlm_serve.engine.steps.token_counts import FEWEST_SLOTS, Counted, TokenCounts, to_device
from vlm_serve.kernels.sampling import DRAWN, GREEDY, REPORT, Found, Mark, Rows, sample_rows

_ALIGNED = 16
"""Bytes between two tables: Triton specialises kernels on the alignment of their pointers."""
_PLAIN = (1.0, 2.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
"""Numbers of a row of which nothing is asked but its likeliest token."""


class RowParams(Counted, Protocol):
    """A sampler's wishes for its rows.

    Attributes:
        is_penalised: True if earlier tokens change the logits.
        logprobs: how many likeliest tokens are told beside the sampled one; None for nothing.
        named: tokens that are told beside those.
        bias: ids and values, ascending.
        top_k: 0 for all.
    """

    is_penalised: bool
    logprobs: int | None
    named: tuple[int, ...]
    bias: tuple[tuple[int, float], ...]
    top_k: int

    def numbers(self, position: int) -> tuple[float, ...]:
        """Return the numbers of a row, see `Rows`; a temperature of 0 asks for the likeliest."""
        ...


class Chosen(NamedTuple):
    """Tokens of rows and their requested log-probabilities, on the device or on the host.

    Attributes:
        found: see `Found.tokens`.
        told: the number of tokens that each row is to tell beside its own; -1 for no
            log-probability. Empty if none is to tell any.
    """

    found: torch.Tensor
    told: tuple[int, ...] = ()

    def mapped(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Chosen:
        """Return the same with a copy of the tensor."""
        return Chosen(copy(self.found), self.told)

    def tokens(self) -> list[int]:
        """Return the token of each row; waits for a device."""
        tokens: list[int] = self.found[0, :, 0].tolist()
        return tokens

    def token(self, row: int) -> int:
        """Return the token of a row; waits for a device."""
        return int(self.found[0, row, 0])

    def read(self) -> list[tuple[int, dict[int, float]]]:
        """Return token and report of each row; waits for a device."""
        if not self.told:
            return [(token, {}) for token in self.tokens()]
        host = self.found.cpu()
        ids, values = host[0].tolist(), host[1].view(torch.float32).tolist()
        found = list[tuple[int, dict[int, float]]]()
        for row_ids, row_values, count in zip(ids, values, self.told, strict=True):
            report = dict[int, float]()
            for token, value in zip(row_ids[: 1 + count], row_values, strict=False):
                report.setdefault(token, value)
            found.append((row_ids[0], report))
        return found


def choose_tasks(
    logits: torch.Tensor,
    tasks: Sequence[SampleTask],
    samplers: Mapping[int, RowParams],
    rows: Sequence[int],
    counts: TokenCounts | None = None,
) -> Chosen:
    """Sample a token for each task, see `prepare`."""
    return prepare(logits, tasks, samplers, rows, counts)()


def prepare(
    logits: torch.Tensor,
    tasks: Sequence[SampleTask],
    samplers: Mapping[int, RowParams],
    rows: Sequence[int],
    counts: TokenCounts | None = None,
    *,
    before: torch.Tensor | None = None,
    following: torch.Tensor | None = None,
) -> Callable[[], Chosen]:
    """Return a function that samples a token for each task, none of which needs another one's,
    without a wait.

    Args:
        logits: float32 `[L, vocab]`.
        tasks: of the rows; none if each row's likeliest token is wanted.
        samplers: by sequence.
        rows: row of `logits` for each task.
        counts: of penalised sequences; None: counted anew.
        before: int64, the newest token of each task's answer where the host does not know it.
        following: int64, gets each token, 0 for one that is `UNSOUND`.
    """
    asked, vocab = _Asked(logits.shape[1]), logits.shape[1]
    counts = counts or TokenCounts(FEWEST_SLOTS, logits.device)
    penalised = {task.sequence for task in tasks if samplers[task.sequence].is_penalised}
    if penalised:
        counts.reserve(len(penalised), vocab)
    beside = frozenset(penalised)
    for task, row in zip(tasks, rows, strict=False):
        sampler = samplers[task.sequence]
        counted = counts.place(sampler, task.position, beside) if sampler.is_penalised else (-1, -1)
        asked.add(row, task, sampler, counted)
    for row in rows if not tasks else ():
        asked.add_plain(row)
    told, most = tuple(asked.told), max(asked.told, default=-1)
    table, work, device = counts.table, counts.work(), logits.device

    def choose() -> Chosen:
        for each in work:
            each()
        own = len(rows)
        known = torch.empty(1, dtype=torch.int64, device=device) if before is None else before
        tokens = following
        if tokens is None:
            tokens = torch.empty(own, dtype=torch.int64, device=device)
        shape = 2, own, 1 + max(most, 0)
        found = Found(torch.empty(shape, dtype=torch.int32, device=device), tokens)
        sent, options = asked.sent(device, known), (asked.draws, asked.unlimited)
        sample_rows(logits, sent, table, found, draws=options[0], unlimited=options[1])
        return Chosen(found.tokens, told if most >= 0 else ())

    return choose


class _Asked:
    """Numbers of rows, collected on the host.

    Args:
        vocab: tokens.

    Attributes:
        told: see `Chosen`.
        draws, unlimited: see `sample_rows`.
    """

    def __init__(self, vocab: int) -> None:
        self.told: list[int] = []
        self.draws = self.unlimited = False
        self._vocab = vocab
        self._marks, self._reports = list[Mark](), list[Mark]()
        self._numbers: list[tuple[float, ...]] = []
        self._biases: list[tuple[int, float]] = []
        self._masks: dict[int, tuple[int, bytes]] = {}

    def add_plain(self, row: int) -> None:
        """Ask for the likeliest token of a row."""
        self.told.append(-1)
        self._marks.append(Mark(row, GREEDY))
        self._numbers.append(_PLAIN)

    def add(self, row: int, task: SampleTask, sampler: RowParams, counted: tuple[int, int]) -> None:
        """Ask for what a task wants of a row."""
        numbers, mask = sampler.numbers(task.position), -1
        kind, first = DRAWN if numbers[0] else GREEDY, len(self._biases)
        if task.mask is not None:
            mask = self._masks.setdefault(id(task.mask), (len(self._masks), task.mask))[0]
        self._biases += sampler.bias
        likeliest = -1 if sampler.logprobs is None else min(sampler.logprobs, self._vocab)
        changes = not task.unbiased and bool(sampler.bias or sampler.is_penalised)
        top_k = sampler.top_k if 0 < sampler.top_k < self._vocab else 0
        place, end = len(self._marks), len(self._biases)
        self._biases += [(token, 0.0) for token in sampler.named]
        biases, named = (first, end), (end, len(self._biases))
        self._marks.append(
            Mark(row, kind, top_k, *counted, mask, *biases, 1 + likeliest, int(changes), *named)
        )
        self._numbers.append(numbers if numbers[0] else (1.0, *numbers[1:]))
        self.told.append(likeliest + len(sampler.named))
        if likeliest > 0:
            self._reports.append(Mark(row, REPORT, likeliest, told=place))
        self.draws |= kind == DRAWN or likeliest > 0
        self.unlimited |= kind == DRAWN and not top_k

    def sent(self, device: torch.device, before: torch.Tensor) -> Rows:
        """Send all to a device, as one copy that nothing waits for."""
        masks = np.zeros((max(1, len(self._masks)), -(-self._vocab // 8)), np.uint8)
        for place, mask in self._masks.values():
            bits = np.frombuffer(mask, np.uint8)[: masks.shape[1]]
            masks[place, : len(bits)] = bits
        ids, values = zip(*self._biases or [(0, 0.0)], strict=True)
        numbers = [*self._numbers, *[_PLAIN] * len(self._reports)]
        parts: list[npt.NDArray[np.generic]] = [
            np.array(numbers, np.float64),
            np.array([*self._marks, *self._reports], np.int32),
            masks,
            np.array(ids, np.int32),
            np.array(values, np.float32),
        ]
        ends = np.cumsum([-(-part.nbytes // _ALIGNED) * _ALIGNED for part in parts]).tolist()
        flat = np.zeros(ends[-1], np.uint8)
        for part, begin in zip(parts, [0, *ends], strict=False):
            flat[begin : begin + part.nbytes] = part.reshape(-1).view(np.uint8)
        there = to_device(torch.from_numpy(flat), device)

        def table(place: int, dtype: torch.dtype) -> torch.Tensor:
            begin = [0, *ends][place]
            return there[begin : begin + parts[place].nbytes].view(dtype).view(parts[place].shape)

        return Rows(
            table(0, torch.float64),
            table(1, torch.int32),
            table(2, torch.uint8),
            table(3, torch.int32),
            table(4, torch.float32),
            before,
        )
