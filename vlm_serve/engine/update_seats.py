"""The update slots of sequences: they keep what a verify slice does to a state until the fold."""

from __future__ import annotations

from dataclasses import dataclass

MOST_REPLAYS = 4
"""Requests that replay at a time."""
REPLAYED_TOKENS = 16
"""Of a slice, where there are no drafts: on a CPU as many rows cost little more than one."""


@dataclass(frozen=True, slots=True)
class UpdateSeats:
    """`count` sequences have room for `size` updates each."""

    count: int
    size: int

    @classmethod
    def of(cls, max_num_seqs: int, speculative_tokens: int) -> UpdateSeats:
        """With drafts every sequence has a seat, for the sampled token and its drafts. Without
        them there are some for replays."""
        if speculative_tokens:
            return cls(max_num_seqs, speculative_tokens + 1)
        return cls(min(max_num_seqs, MOST_REPLAYS), REPLAYED_TOKENS)

    @property
    def total(self) -> int:
        return self.count * self.size
