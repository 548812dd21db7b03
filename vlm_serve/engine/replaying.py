"""Replays the beginning of an answer that another engine has given: its tokens are forced.

They are drafts that hold whatever is drawn, so they are computed as decode tokens, several in a
slice; never as prompt. What is drawn is compared all the same.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from vlm_serve.engine.plan import Sampled, Slice
from vlm_serve.engine.queues import SequenceQueues
from vlm_serve.engine.sequence import Sequence, SequenceGroup
from vlm_serve.engine.update_slots import MAX_REPLAYS
from vlm_serve.engine.verifying import verify_capacity, verify_slice


@dataclass(slots=True)
class ReplayCounts:
    """What has been replayed.

    Attributes:
        requests: that came with the beginning of their answers.
        tokens: forced so far.
        disagreements: of those, the ones for which another token was drawn; none between engines of
            the same numerics.
    """

    requests: int = 0
    tokens: int = 0
    disagreements: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class Replays:
    """Replays take what a step has left, as prefills do, and few run at a time: the requests of an
    engine that has died are not to slow down those of the others.

    Args:
        roster: whose sequences replay.
        state_interval: tokens between state snapshots while decoding; 0: none.

    Attributes:
        counts: what has been replayed.
    """

    def __init__(self, queues: SequenceQueues, state_interval: int) -> None:
        self.counts = ReplayCounts()
        self._queues = queues
        self._interval = state_interval

    def add(self, group: SequenceGroup) -> None:
        """A request has come."""
        self.counts.requests += any(sequence.replaying for sequence in group.sequences)

    def may_start(self, sequence: Sequence) -> bool:
        """Whether a sequence may be admitted: one that replays waits for others that do."""
        if not sequence.replaying or sequence.suspect_until:
            return True
        groups = {id(other.group) for other in self._queues.running if other.replaying}
        return id(sequence.group) in groups or len(groups) < MAX_REPLAYS

    def extended(self, item: Slice, budget: int) -> Slice:
        """A decode token of a sequence that replays, with the forced tokens behind it.

        Args:
            budget: tokens that may be added.

        Raises InvalidRequestError as `Sequence.draft_tasks` does.
        """
        queues, sequence = self._queues, self._queues[item.sequence]
        if sequence.suspect_until:
            return item
        room = min(budget, verify_capacity(queues, item, self._interval))
        if queues.update_size:
            room = min(room, queues.update_size - 1)
        ahead = sequence.forced[sequence.num_generated :]
        return verify_slice(queues, item, ahead[: max(0, room)])

    def count(self, sequence: Sequence, sampled: Sampled) -> None:
        """A token is about to be accepted."""
        self.counts.tokens += sequence.replaying
        self.counts.disagreements += sampled.drawn is not None
