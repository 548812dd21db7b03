"""How often answers with penalties have each token: a table on a GPU, which sampling itself keeps
up to date."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from vlm_serve.kernels.sampling.reference import PROMPT

FEWEST_SLOTS = 8
"""Of a table whose size nobody has given."""
_NOTHING = -2
"""Tokens counted in a row that has not been written yet."""


class Counted(Protocol):
    """A sequence whose tokens are counted.

    Attributes:
        sequence: its number.
        prompt: the prompt's tokens that count.
        generated: tokens of its answer, as far as the host knows them.
        unchanged: how many of them have not been replaced since they were counted.
    """

    sequence: int
    prompt: frozenset[int]
    generated: list[int]
    unchanged: int


@dataclass(slots=True)
class _Slot:
    index: int
    counted: int
    """Tokens of the answer that the row has."""


class TokenCounts:
    """Rows of a table by sequence.

    What is not up to date is written anew from what the host knows, by copies that nothing waits
    for. So is the row of a sequence that has lost its slot to another one.

    Args:
        most: sequences that are sampled together at most.
        device: of the table.

    Attributes:
        table: int32 `[slots, vocab]`, see `kernels.sampling`; made for the first penalty.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self.table = torch.zeros((1, 1), dtype=torch.int32, device=device)
        self._most, self._device = most, device
        self._slots: dict[int, _Slot] = {}
        self._free: list[int] = []
        self._work: list[Callable[[], object]] = []

    def reserve(self, count: int, vocab: int) -> None:
        """Make room for so many sequences at once."""
        rows = 0 if self.table.shape[1] != vocab else len(self.table)
        if rows >= count:
            return
        table = torch.zeros((max(self._most, count), vocab), dtype=torch.int32, device=self._device)
        if rows:
            self._work.append(partial(table[:rows].copy_, self.table))
        self.table = table
        self._free += range(rows, len(table))

    def place(self, sequence: Counted, position: int, beside: frozenset[int]) -> tuple[int, int]:
        """Return a sequence's row, and the token that is to be counted beside it: -1 for none, -2
        for one that only the device knows.

        Args:
            sequence: the sequence.
            position: tokens of its answer that count.
            beside: sequences of the same step, which keep their rows.
        """
        slot = self._slots.get(sequence.sequence)
        if slot is None:
            slot = self._slots[sequence.sequence] = _Slot(self._index(beside), _NOTHING)
        is_right = slot.counted <= sequence.unchanged
        newest = -1
        if is_right and slot.counted == position - 1:
            known = position <= len(sequence.generated)
            newest = sequence.generated[position - 1] if known else -2
        elif not is_right or slot.counted != position:
            self._write(slot.index, sequence, position)
        slot.counted = sequence.unchanged = position
        # Moves it behind the others, of which the first loses its row.
        self._slots[sequence.sequence] = self._slots.pop(sequence.sequence)
        return slot.index, newest

    def work(self) -> list[Callable[[], object]]:
        """Return what the device has to do before it samples, since the last call."""
        work, self._work = self._work, []
        return work

    def forget(self, sequence: int) -> None:
        """Free the row of a sequence."""
        slot = self._slots.pop(sequence, None)
        if slot is not None:
            self._free.append(slot.index)

    def clear(self) -> None:
        """Forget all rows: nobody knows what a failed step has counted."""
        for sequence in list(self._slots):
            self.forget(sequence)

    def _index(self, beside: frozenset[int]) -> int:
        if not self._free:
            self.forget(next(number for number in self._slots if number not in beside))
        return self._free.pop()

    def _write(self, index: int, sequence: Counted, position: int) -> None:
        assert position <= len(sequence.generated), "tokens that the host does not know"
        row = np.bincount(sequence.generated[:position], minlength=self.table.shape[1])
        row[list(sequence.prompt)] += PROMPT
        host = pinned(torch.from_numpy(row.astype(np.int32)), self._device)
        self._work.append(partial(self.table[index].copy_, host, non_blocking=True))


def pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor in memory that is copied to a device without a wait: a copy out of
    pageable memory would wait for all that is queued."""
    return host.pin_memory() if device.type == "cuda" else host


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor's copy on a device, which nothing waits for."""
    return pinned(host, device).to(device, non_blocking=True)
