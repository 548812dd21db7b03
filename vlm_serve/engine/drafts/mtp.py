"""Drafts of the model's multi-token-prediction layer. The executor makes them behind a step; here
they wait for the next one."""

from __future__ import annotations

from vlm_serve.engine.sequence import Sequence


class MtpDrafter:
    """What was drafted for each sequence, and behind how many of its tokens."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[int, tuple[int, ...]]] = {}

    def take(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Drafts that follow all tokens which the sequence has."""
        self._made[sequence.number] = (sequence.num_tokens, drafts)

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        num_tokens, drafts = self._made.get(sequence.number, (0, ()))
        return drafts[:limit] if num_tokens == sequence.num_tokens else ()

    def evidence(self, sequence: Sequence) -> int:
        """They all come from the same layer; only their places differ."""
        return 0

    def forget(self, sequence: Sequence) -> None:
        self._made.pop(sequence.number, None)
