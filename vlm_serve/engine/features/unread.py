"""Answers whose clients are slow to read: they run no further until they have been read."""

from __future__ import annotations

from vlm_serve.engine.core.queues import SequenceQueues
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup


class Unread:
    """Suspends the sequences of requests that are held.

    Args:
        queues: waiting and running sequences.
    """

    def __init__(self, queues: SequenceQueues) -> None:
        self._queues = queues
        self._held = queues.held

    def hold(self, group: SequenceGroup, *, held: bool) -> None:
        """Suspend a request from the next step on, or have it run again."""
        for sequence in group.sequences:
            if held and sequence.answer.finish_reason is None:
                self._held.add(sequence.number)
            else:
                self._held.discard(sequence.number)

    def on_ended(self, sequence: Sequence) -> None:
        """Forget an ended sequence."""
        self._held.discard(sequence.number)

    def plan_open(self, room: int) -> int:
        """Have held sequences give up their seats; take no token."""
        if self._held:
            for sequence in list(self._queues.running):
                if sequence.number in self._held and not self._queues.is_copied(sequence):
                    self._queues.preempt(sequence)
        return 0

    def may_extend(self, blocks: int, rows: int) -> str:
        """Return "unread" if a held sequence is to give up its seat."""
        held = (each.number in self._held for each in self._queues.running)
        return "unread" if self._held and any(held) else ""

    def is_busy(self) -> bool:
        """Return True while a client has to read first."""
        return bool(self._held)
