"""What a source of drafts is."""

from __future__ import annotations

from typing import Protocol

from vlm_serve.engine.sequence import Sequence

MAX_EVIDENCE = 7


class Drafter(Protocol):
    """Guesses what a sequence generates next. Only the engine's thread calls it."""

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that may follow those that the sequence has."""

    def evidence(self, sequence: Sequence) -> int:
        """How much speaks for what was proposed last, 0 to `MOST_EVIDENCE`; for each draft more
        that holds, one more. What has become of other drafts counts for those that are alike in
        this."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended; what it has said may come again in another one."""
