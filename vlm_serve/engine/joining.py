"""Lets waiting sequences join running prefills: matches both by the rules of the trie.

docs/architecture.md#prefixes-that-are-being-computed
"""

from __future__ import annotations

from dataclasses import replace

from vlm_serve.cache.matching import Match, shared_cut
from vlm_serve.engine.admission import Admitter
from vlm_serve.engine.hooks import Admission, CommittedRow
from vlm_serve.engine.joins import Joins
from vlm_serve.engine.plan import Slice, StepOutput
from vlm_serve.engine.queues import SequenceQueues
from vlm_serve.engine.sequence import Sequence


class Joining:
    """Compares waiting sequences with running prefills, each pair once.

    A sequence joins the prefill that takes its match deepest, if that gains at least
    `min_snapshot_gain` blocks. One block is enough behind a medium's end, where a snapshot stands
    whatever it saves, if the prefill has come as far as the match: it is there no later than the
    sequence would be. Lower cache tiers are asked at the same time, for more than that.

    Args:
        queues: provides the sequences.
        admitter: matches sequences with the cache.

    Attributes:
        joins: who waits for whom.
    """

    def __init__(self, queues: SequenceQueues, admitter: Admitter) -> None:
        config = queues.cache.config
        self.joins = Joins(queues.cache, queues.followers)
        self.on_waiting = self.joins.waits
        self.on_admitted = self.joins.starts
        self.on_stopping = self.joins.stops
        self.on_ended = self.joins.forget
        self.on_fetched = self.joins.release
        self._queues = queues
        self._admitter = admitter
        self._gain = config.min_snapshot_gain * config.block_size
        self._least_gain = config.block_size

    def on_matched(self, admission: Admission) -> None:
        """Report what waiting for a leader has brought."""
        waited = self.joins.take_waited(admission.sequence)
        admission.joined_tokens, admission.joined_ms = waited.report(admission.boundary)

    def on_committed(self, rows: list[CommittedRow], output: StepOutput) -> None:
        """End the waits that are over."""
        self.joins.settle()

    def plan_prompts(self) -> None:
        """Let every waiting sequence join if it gains by it. Call it whenever sequences may have
        begun to wait or to run; it costs nothing otherwise."""
        if self.joins and self._queues.media.loading:
            self._release_stalled()
        for sequence, prefills in self.joins.unseen():
            self._join(sequence, prefills)

    def _release_stalled(self) -> None:
        """Release followers whose leader waits for pixels before the meeting cut, unless they would
        wait for such pixels themselves."""
        media = self._queues.media
        for join in self.joins.all:
            stall = media.stall(join.leader)
            if stall < join.cut and media.stall(join.follower, join.boundary) > stall:
                self.joins.release(join.follower)

    def _join(self, sequence: Sequence, prefills: list[Sequence]) -> None:
        limit = self._admitter.prefill_end(sequence) - 1
        near = [
            each
            for each in prefills
            if self.joins.may_follow(sequence, each) and self._cut(sequence, each, 0, limit)
        ]
        if not near:
            return
        match = self._admitter.match(sequence)
        best: tuple[int, int] = (0, 0)
        leader: Sequence | None = None
        for each in near:
            if not self._fills_experts(sequence, each, match):
                continue
            cut = self._cut(sequence, each, match.boundary, self._reach(sequence, each, match))
            if cut and (cut, each.num_computed) > best:
                best, leader = (cut, each.num_computed), each
        if leader is None or not self._promise(leader, best[0]):
            return
        self.joins.add(sequence, leader, best[0], match.boundary)
        self._admitter.may_use(sequence, match, least=best[0] + 1)

    def _cut(self, sequence: Sequence, leader: Sequence, boundary: int, limit: int) -> int:
        """Return the deepest cut up to `limit` that a leader will come past; 0 if it gains too
        little."""
        limit = min(limit, leader.prefill_target)
        keys, least = sequence.keys, max(boundary + self._gain, leader.num_computed + 1)
        cut = shared_cut(keys, leader.keys, least=least, limit=limit)
        if cut or leader.num_computed < boundary or limit <= boundary + self._least_gain:
            return cut
        least = max(boundary + self._least_gain, leader.num_computed + 1)
        if not keys.span_ends_within(boundary, min(limit, boundary + self._gain)):
            return 0
        near = shared_cut(keys, leader.keys, least=least, limit=limit)
        return near if keys.span_ends_within(boundary, near) else 0

    def _reach(self, sequence: Sequence, leader: Sequence, match: Match) -> int:
        """Return the deepest position that a leader can take a sequence's match to now."""
        media = self._queues.media
        if not media.loading:
            return match.limit
        stall = media.stall(leader)
        if media.stall(sequence, match.boundary) <= stall:
            return match.limit
        return min(match.limit, stall)

    def _fills_experts(self, sequence: Sequence, leader: Sequence, match: Match) -> bool:
        """Return True if the leader leaves the routed experts that a sequence has to have: it
        records them, and what it did not compute has them."""
        if not self._admitter.needs_experts(sequence):
            return True
        return leader.experts is not None and leader.num_cached <= match.boundary

    def _promise(self, leader: Sequence, cut: int) -> bool:
        """Add a meeting cut to the planned slice that passes it. Return False if no row is free for
        the state there: what the leader computes would not help then."""
        queues = self._queues
        if not queues.cache.config.has_state:
            return True
        for place, item in enumerate(queues.planned):
            if item.sequence == leader.number and item.start < cut <= item.end:
                added = self._with_snapshot(leader, item, cut)
                if added is None:
                    return False
                queues.planned[place] = added
        return True

    def _with_snapshot(self, leader: Sequence, item: Slice, cut: int) -> Slice | None:
        if any(position == cut for position, _ in item.snapshots):
            return item
        assert leader.lease is not None
        kind = leader.snapshot_positions.get(cut, "junction")
        row = self._queues.cache.reserve_snapshot(leader.lease, cut, kind)
        if row is None:
            return None
        return replace(item, snapshots=tuple(sorted((*item.snapshots, (cut, row)))))
