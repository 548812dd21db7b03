"""Interface of drafters, the sources of drafts, and the drafter of the model's MTP layer."""

from __future__ import annotations

from typing import Protocol

from vlm_serve.engine.requests.sequence import Sequence

MAX_EVIDENCE = 7


class Drafter(Protocol):
    """Predicts the next tokens of a sequence. Used by the engine's thread only."""

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """Return up to `limit` tokens that may follow the sequence's tokens."""

    def evidence(self, sequence: Sequence) -> int:
        """Return the evidence for the first of the latest drafts, 0 to `MAX_EVIDENCE`. It grows by
        one with each further draft. Acceptance rates are tracked by evidence."""

    def forget(self, sequence: Sequence) -> None:
        """Drop the data of a finished sequence. Its answer may serve as a source for others."""


class MtpDrafter:
    """Stores the drafts that the executor made until the next step: each sequence's, and the number
    of tokens that they follow."""

    def __init__(self) -> None:
        self._drafts: dict[int, tuple[int, tuple[int, ...]]] = {}

    def take(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Store drafts that follow all tokens of the sequence."""
        self._drafts[sequence.number] = (sequence.num_tokens, drafts)

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        num_tokens, drafts = self._drafts.get(sequence.number, (0, ()))
        return drafts[:limit] if num_tokens == sequence.num_tokens else ()

    def evidence(self, sequence: Sequence) -> int:
        """Return 0: all drafts come from the same layer and differ only in their position."""
        return 0

    def forget(self, sequence: Sequence) -> None:
        self._drafts.pop(sequence.number, None)
