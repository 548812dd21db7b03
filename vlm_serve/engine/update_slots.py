"""The update slots of sequences: they keep what a verify slice does to a state until the fold."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from vlm_serve.engine.sequence import Sequence

MAX_REPLAYS = 4
"""Requests that replay at a time."""
REPLAYED_TOKENS = 16
"""Of a slice, where there are no drafts: on a CPU as many rows cost little more than one."""


@dataclass(frozen=True, slots=True)
class UpdateSlots:
    """`count` sequences have room for `size` updates each."""

    count: int
    size: int

    @classmethod
    def of(cls, max_num_seqs: int, speculative_tokens: int) -> UpdateSlots:
        """With drafts every sequence has a seat, for the sampled token and its drafts. Without
        them there are some for replays."""
        if speculative_tokens:
            return cls(max_num_seqs, speculative_tokens + 1)
        return cls(min(max_num_seqs, MAX_REPLAYS), REPLAYED_TOKENS)

    @property
    def total(self) -> int:
        return self.count * self.size


class UpdateSlotAllocator:
    """Whose updates lie where. A sequence may have two seats side by side: where few run, the
    memory of the others is nobody's. Those at even places are given first, so that the ones beside
    them stay free for as long as there are enough.

    Args:
        seats: how many there are, and how large.
    """

    def __init__(self, slots: UpdateSlots) -> None:
        self._size = slots.size
        self._free: list[int] = []
        self._held: dict[Sequence, list[int]] = {}
        for slot in range(slots.count):
            self._return_slot(slot)

    def first_update(self, sequence: Sequence) -> int:
        """Of a sequence's updates the first; it has a seat."""
        return self._held[sequence][0] * self._size

    def capacity(self, sequence: Sequence) -> int:
        """Tokens of a sequence whose updates have a place; 0: none."""
        own = self._held.get(sequence)
        if own is None and not self._free:
            return 0
        first = self._free[-1] if own is None else own[0]
        return self._size * (2 if self._has_neighbour(first, own or []) else 1)

    def take(self, sequence: Sequence, tokens: int) -> int:
        """Makes room for the updates of so many tokens, at most `room`, where those that are
        pending lie; returns the first."""
        if sequence not in self._held:
            self._held[sequence] = [self._free.pop()]
        own = self._held[sequence]
        if tokens > self._size:
            assert self._has_neighbour(own[0], own)
            if len(own) == 1:
                own.append(own[0] + 1)
                self._free.remove(own[1])
        elif sequence.pending <= self._size and len(own) > 1:
            self._return_slot(own.pop())
        return own[0] * self._size

    def release(self, sequence: Sequence) -> None:
        """Nothing of a sequence is pending any more."""
        for slot in self._held.pop(sequence, ()):
            self._return_slot(slot)

    def _has_neighbour(self, slot: int, own: list[int]) -> bool:
        """Whether the seat behind one at an even place is the sequence's own or may be."""
        return slot % 2 == 0 and (len(own) > 1 or slot + 1 in self._free)

    def _return_slot(self, slot: int) -> None:
        insort(self._free, slot, key=lambda each: (each % 2 == 0, -each))
