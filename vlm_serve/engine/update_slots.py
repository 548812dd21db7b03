"""Update slots of sequences. They hold the state updates of a verify slice until they are
folded."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from vlm_serve.engine.sequence import Sequence

MAX_REPLAYS = 4
"""Maximum number of requests that replay at the same time."""
REPLAYED_TOKENS = 16
"""Tokens per slice of a replay if drafts are disabled. On a CPU this many rows cost little more
than one."""


@dataclass(frozen=True, slots=True)
class UpdateSlots:
    """Number and size of update slots: `count` slots of `size` updates each."""

    count: int
    size: int

    @classmethod
    def of(cls, max_num_seqs: int, speculative_tokens: int) -> UpdateSlots:
        """Choose number and size of the slots. With drafts, every sequence has a slot for its
        sampled token and its drafts. Without drafts, a few slots serve replays."""
        if speculative_tokens:
            return cls(max_num_seqs, speculative_tokens + 1)
        return cls(min(max_num_seqs, MAX_REPLAYS), REPLAYED_TOKENS)

    @property
    def total(self) -> int:
        return self.count * self.size


class UpdateSlotAllocator:
    """Allocates update slots to sequences.

    A sequence may hold two adjacent slots: if few sequences run, the other slots are free. Slots at
    even indices are allocated first, so that their neighbours stay free as long as possible.

    Args:
        slots: number and size of the slots.
    """

    def __init__(self, slots: UpdateSlots) -> None:
        self._size = slots.size
        self._free: list[int] = []
        self._held: dict[Sequence, list[int]] = {}
        for slot in range(slots.count):
            self._return_slot(slot)

    def first_update(self, sequence: Sequence) -> int:
        """Return the index of the first update of a sequence that holds a slot."""
        return self._held[sequence][0] * self._size

    def capacity(self, sequence: Sequence) -> int:
        """Return the number of tokens of a sequence whose updates can be stored; 0 if no slot is
        free."""
        own = self._held.get(sequence)
        if own is None and not self._free:
            return 0
        first = self._free[-1] if own is None else own[0]
        return self._size * (2 if self._has_neighbour(first, own or []) else 1)

    def take(self, sequence: Sequence, tokens: int) -> int:
        """Allocate space for the updates of `tokens` tokens, at most `capacity`. Return the index
        of the first update. Pending updates keep their place."""
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
        """Free the slots of a sequence; none of its updates is pending."""
        for slot in self._held.pop(sequence, ()):
            self._return_slot(slot)

    def _has_neighbour(self, slot: int, own: list[int]) -> bool:
        """Return True if a slot at an even index can be extended by the next one: it is free or
        already the sequence's own."""
        return slot % 2 == 0 and (len(own) > 1 or slot + 1 in self._free)

    def _return_slot(self, slot: int) -> None:
        insort(self._free, slot, key=lambda each: (each % 2 == 0, -each))
