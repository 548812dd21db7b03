"""Replays the start of an answer that another engine has given: its tokens are forced.

Forced tokens are drafts that are always accepted. They are computed as decode tokens, several in a
slice, never as prompt. Tokens are still drawn, and compared with the forced ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from vlm_serve.engine.core.hooks import CommittedRow
from vlm_serve.engine.core.queues import MAX_REPLAYS, SequenceQueues
from vlm_serve.engine.requests.plan import Slice, StepOutput
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup


@dataclass(slots=True)
class ReplayCounts:
    """Counters of replays.

    Attributes:
        requests: number of requests with forced tokens.
        tokens: number of forced tokens.
        disagreements: number of forced tokens that differ from the drawn ones; 0 between engines
            with the same numerics.
    """

    requests: int = 0
    tokens: int = 0
    disagreements: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class Replays:
    """Extends the slices of replaying sequences. Replays use the remaining budget of a step, as
    prefills do, and few run at a time. So the requests of a failed engine do not slow down all
    others.

    Args:
        queues: provides the sequences.
        state_interval: tokens between state snapshots while decoding; 0 means none.

    Attributes:
        counts: counters of replays.
    """

    def __init__(self, queues: SequenceQueues, state_interval: int) -> None:
        self.counts = ReplayCounts()
        self._queues = queues
        self._interval = state_interval

    def on_added(self, group: SequenceGroup) -> None:
        """Count a new request."""
        self.counts.requests += any(sequence.replaying for sequence in group.sequences)

    def may_start(self, sequence: Sequence) -> bool:
        """Return True if a sequence may be admitted: the number of replaying requests is
        limited."""
        if not sequence.replaying or sequence.suspect_until:
            return True
        groups = {id(other.group) for other in self._queues.running if other.replaying}
        return id(sequence.group) in groups or len(groups) < MAX_REPLAYS

    def plan_decode(self, sequence: Sequence, item: Slice, budget: int) -> Slice:
        """Return a decode token of a replaying sequence, extended by the next forced tokens. Where
        only decode steps have a decode step's bits, it stays alone.

        Args:
            sequence: its sequence.
            item: the decode token.
            budget: number of tokens that may be added.

        Raises InvalidRequestError as `Sequence.draft_tasks` does.
        """
        queues = self._queues
        if sequence.suspect_until or queues.cache.config.exact_only:
            return item
        room = min(budget, queues.verify_capacity(item, self._interval))
        if queues.update_size:
            room = min(room, queues.update_size - 1)
        ahead = sequence.forced[sequence.num_generated :]
        return queues.verify_slice(item, ahead[: max(0, room)])

    def on_committed(self, rows: list[CommittedRow], output: StepOutput) -> None:
        """Count the forced tokens of a step."""
        for _, item, accepted in rows:
            taken: Counter[int] = Counter()
            for task in item.samples:
                place = taken[task.sequence]
                taken[task.sequence] += 1
                if task.forced is None or place >= accepted:
                    continue
                self.counts.tokens += 1
                self.counts.disagreements += output.sampled[task.sequence][place].drawn is not None
