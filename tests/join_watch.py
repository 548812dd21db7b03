"""Recomputes what must hold of waiting requests that wait for running prefills."""

from __future__ import annotations

from collections import Counter

from vlm_serve.cache.matching import key_at
from vlm_serve.engine.core.queues import order
from vlm_serve.engine.core.scheduler import Scheduler
from vlm_serve.engine.features.joins import (
    MAX_FRUITLESS_JOINS,
    MAX_IDLE_STEPS,
    Join,
    Joining,
    Joins,
)
from vlm_serve.engine.features.table import Features


class JoinWatch:
    """Checks a scheduler's joins after every step, and that every wait is bounded.

    Attributes:
        counts: what was seen how often.
    """

    def __init__(self, scheduler: Scheduler, features: Features) -> None:
        self._queues = scheduler.queues
        joining = features.get(Joining)
        self._book = Joins(self._queues.cache, set()) if joining is None else joining.joins
        self._steps: dict[Join, int] = {}
        self._joins: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()

    def check(self, *, committed: bool) -> None:
        """Check everything.

        Args:
            committed: a step has succeeded since the last call.
        """
        self._check_joins()
        self._check_order()
        self._check_expected()
        self._check_waits(committed=committed)

    def _check_joins(self) -> None:
        queues = self._queues
        for join in self._book.all:
            follower, leader = join.follower, join.leader
            assert follower in queues.waiting and follower.lease is None, "a follower has a lease"
            assert follower.suspended is None and not follower.suspect_until, "it has to resume"
            assert not follower.request.cold and not leader.request.cold, "a cold run shares"
            assert leader in queues.running and leader.lease is not None, "a leader has no lease"
            assert leader not in self._book, "a leader waits"
            assert leader.num_computed < join.cut <= leader.prefill_target, "it never comes there"
            assert join.cut < follower.num_tokens, "one token is always computed"
            assert not follower.keys.inside_span(join.cut), "a boundary inside of a medium"
            assert key_at(follower.keys, join.cut) == key_at(leader.keys, join.cut), "other tokens"
            size, gain = queues.cache.config.block_size, join.cut - join.boundary
            enough = queues.cache.config.min_snapshot_gain * size
            if follower.keys.span_ends_within(join.boundary, join.cut):
                enough = size
            assert gain >= enough, "too little to wait for"
            if queues.cache.config.has_state:
                assert join.cut in leader.snapshot_positions, "no state will be there"

    def _check_order(self) -> None:
        queues = self._queues
        followers: dict[int, list[int]] = {}
        for join in self._book.all:
            priority = join.follower.request.priority
            followers.setdefault(join.leader.number, []).append(priority)
        for sequence in (*queues.running, *queues.waiting):
            best = min([sequence.request.priority, *followers.get(sequence.number, ())])
            assert sequence.priority == best, "a priority is not that of its followers"
        assert queues.waiting == sorted(queues.waiting, key=order), "the queue is out of order"

    def _check_expected(self) -> None:
        histories = self._book._histories.values()
        expected = Counter(id(each.expected) for each in histories if each.expected is not None)
        found = {id(node): node.expected for node in self._queues.cache.nodes() if node.expected}
        assert all(expected[node] == count for node, count in found.items()), (
            "a use that nobody has"
        )
        for history in self._book._histories.values():
            node = history.expected
            if node is not None:
                assert node.expected == expected[id(node)], "a use is not counted"

    def _check_waits(self, *, committed: bool) -> None:
        current = self._book.all
        for join in current:
            if join not in self._steps:
                self.counts["joins"] += 1
                self._joins[join.follower.number] += 1
            waited = self._steps[join] = self._steps.get(join, 0) + committed
            cuts = sum(cut <= join.cut for cut in join.leader.keys.cuts)
            assert waited <= MAX_IDLE_STEPS * (cuts + 1), "a follower waits for ever"
            # Each join but the fruitless ones, or one of a fetch, took the match deeper.
            most = 2 * (len(join.follower.keys.cuts) + MAX_FRUITLESS_JOINS + 1)
            assert self._joins[join.follower.number] <= most, "a follower joins for ever"
        self._steps = {join: self._steps[join] for join in current}
