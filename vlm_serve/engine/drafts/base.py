"""Interface of drafters, the sources of drafts."""

from __future__ import annotations

from typing import Protocol

from vlm_serve.engine.sequence import Sequence

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
