"""Drafter of the model's MTP layer: stores the drafts that the executor made until the next
step."""

from __future__ import annotations

from vlm_serve.engine.sequence import Sequence


class MtpDrafter:
    """Stores each sequence's drafts and the number of tokens that they follow."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[int, tuple[int, ...]]] = {}

    def take(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Store drafts that follow all tokens of the sequence."""
        self._made[sequence.number] = (sequence.num_tokens, drafts)

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        num_tokens, drafts = self._made.get(sequence.number, (0, ()))
        return drafts[:limit] if num_tokens == sequence.num_tokens else ()

    def evidence(self, sequence: Sequence) -> int:
        """Return 0: all drafts come from the same layer and differ only in their position."""
        return 0

    def forget(self, sequence: Sequence) -> None:
        self._made.pop(sequence.number, None)
