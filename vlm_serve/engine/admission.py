"""From the waiting queue into the running set: match, pin, reserve, or roll everything back."""

from __future__ import annotations

from vlm_serve.cache.placement import plan_snapshots
from vlm_serve.cache.prefix_cache import Match, PrefixCache
from vlm_serve.engine.outputs import CacheReport
from vlm_serve.engine.sequence import Sequence
from vlm_serve.engine.slicing import slice_end


class Admission:
    """Admits sequences one at a time.

    Args:
        cache: where matches, rows and blocks come from.
        state_interval: tokens between the regular snapshots of a long prompt.
        complete_experts: a request for routed experts reuses only what has them.
    """

    def __init__(
        self, cache: PrefixCache, state_interval: int, *, complete_experts: bool = False
    ) -> None:
        self._cache = cache
        self._state_interval = state_interval
        self._complete_experts = complete_experts

    def admit(self, sequence: Sequence, budget: int, *, alone: bool) -> bool:
        """Gives the sequence a lease with a live row and the blocks of its first slice.

        A tentative match is rolled back completely if something is missing. If nothing else runs,
        the match itself may hold the only evictable snapshot: then one more try goes without it.

        Args:
            budget: tokens its first slice may have.
            alone: nothing else is running.
        """
        if sequence.suspended is not None:
            lease = self._cache.resume(sequence.suspended)
            sequence.suspended = None
            if lease is not None:
                sequence.lease = lease
                return True
        match = self._cache.match(
            sequence.keys,
            limit=sequence.num_tokens - 1,
            complete_experts=self._complete_experts and sequence.experts is not None,
        )
        if self._start(sequence, match, budget):
            self._account(sequence, match)
            return True
        if alone and match.boundary and self._start(sequence, None, budget):
            self._account(sequence, match, used=0)
            return True
        return False

    def _start(self, sequence: Sequence, match: Match | None, budget: int) -> bool:
        lease = self._cache.open(match)
        target = sequence.num_tokens
        start = lease.boundary
        end = slice_end(sequence.keys.cuts, start, target, budget)
        if end <= start or not self._cache.take_row(lease) or not self._cache.grow(lease, end):
            self._cache.close(lease)
            return False
        sequence.lease = lease
        if sequence.experts is not None:
            sequence.experts.replay(self._cache.cached_experts(lease))
        sequence.num_cached = sequence.num_computed = start
        sequence.prefill_target = target
        sequence.snapshot_positions = dict(
            plan_snapshots(
                sequence.prompt,
                start=start,
                junction=match.kv_boundary if match is not None and match.junction else 0,
                interval=self._state_interval,
                min_gain=self._cache.config.min_snapshot_gain * self._cache.config.block_size,
            )
        )
        return True

    def _account(self, sequence: Sequence, match: Match, used: int | None = None) -> None:
        request, experts = sequence.request, sequence.experts
        boundary = match.boundary if used is None else used
        replay = request.report is not None
        self._cache.record(match, len(sequence.prompt), used=boundary, replay=replay)
        if replay:
            return
        request.cached_tokens = boundary
        request.report = CacheReport(
            prompt_tokens=len(sequence.prompt),
            kv_boundary=match.kv_boundary,
            state_boundary=match.state_boundary,
            boundary=boundary,
            tiers={"device": boundary} if boundary else {},
            reason=match.reason,
            experts_missing=0 if experts is None else experts.num_unknown(boundary),
        )
