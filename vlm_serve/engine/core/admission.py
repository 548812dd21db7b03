"""Admission of waiting sequences: match, pin and reserve, or roll everything back."""

from __future__ import annotations

from dataclasses import replace

from vlm_serve.cache.placement import plan_snapshots
from vlm_serve.cache.prefix_cache import Match, PrefixCache
from vlm_serve.engine.core.hooks import Admission, Hooks, Needs
from vlm_serve.engine.core.slicing import slice_end
from vlm_serve.engine.requests.outputs import CacheReport
from vlm_serve.engine.requests.reports import boundary_key, prompt_segments, tokens_by_tier
from vlm_serve.engine.requests.sequence import Sequence


class Admitter:
    """Admits sequences one at a time.

    Args:
        cache: prefix cache with blocks and rows.
        hooks: features that may have a sequence wait for a deeper match, and that add to reports.
        state_interval: tokens between regular snapshots of a long prompt.
    """

    def __init__(self, cache: PrefixCache, hooks: Hooks, state_interval: int) -> None:
        self._cache = cache
        self._hooks = hooks
        self._state_interval = state_interval
        self._refused: tuple[object, ...] = ()

    def admit(self, sequence: Sequence, budget: int, *, alone: bool, whole: bool = False) -> bool:
        """Give the sequence a lease with a live row and the blocks of its first slice. Return False
        if that is not possible now.

        If anything is missing, the tentative match is rolled back completely. If nothing else is
        running, the match itself may hold the only evictable snapshot: it is then retried without
        the match. If a deeper match is on its way, the sequence is set to `fetching` first.

        Args:
            budget: maximum number of tokens of its first slice.
            alone: True if nothing else is running.
            whole: admit only if the first slice completes the prompt.
        """
        if sequence.suspended is not None:
            lease = self._cache.resume(sequence.suspended)
            if lease is None and sequence.suspended.valid:
                return False
            sequence.suspended = None
            if lease is not None:
                sequence.lease = lease
                return True
        attempt = (sequence.keys, budget, alone, whole, self._cache.version)
        if self._refused == attempt:
            return False  # the cache has not changed since the last attempt
        admitted = self._try(sequence, budget, alone=alone, whole=whole)
        if not admitted and not sequence.fetching:
            self._refused = (*attempt[:-1], self._cache.version)
        return admitted

    def _try(self, sequence: Sequence, budget: int, *, alone: bool, whole: bool) -> bool:
        if sequence.request.cold:
            return self._start(sequence, None, budget, whole=whole)
        match = self.match(sequence)
        # After a failed step, recompute instead of fetching.
        if not sequence.suspect_until and not self.may_use(sequence, match):
            return False
        if self._start(sequence, match, budget, whole=whole):
            self._record_admission(sequence, match)
            return True
        if alone and match.boundary and self._start(sequence, None, budget, whole=whole):
            self._record_admission(sequence, match, used=0)
            return True
        return False

    def prefill_end(self, sequence: Sequence) -> int:
        """Return the number of a waiting sequence's tokens that prefill computes. These are all of
        them, or its prompt alone: decoding then computes its answer again."""
        exact = self._cache.config.exact_only
        return len(sequence.prompt) if exact else sequence.num_tokens

    def match(self, sequence: Sequence) -> Match:
        """Return what the cache has of a waiting sequence."""
        target, needs = self.prefill_end(sequence), self._needs(sequence)
        self._cache.bring_marks(sequence.keys)
        return self._cache.match(
            sequence.keys,
            limit=target - 1,
            length=target,
            complete_experts=needs.complete_experts,
            logprobs=needs.logprobs,
        )

    def _needs(self, sequence: Sequence) -> Needs:
        """Return what features need of a sequence's prompt."""
        needs = Needs()
        for ask in self._hooks.on_matching:
            ask(sequence, needs)
        return needs

    def may_use(self, sequence: Sequence, match: Match, least: int = 0) -> bool:
        """Return False if a sequence must wait for a match that becomes deeper than this one.

        Args:
            least: depth from which waiting is worth it.
        """
        return all(may(sequence, match, least) for may in self._hooks.may_use)

    def _start(self, sequence: Sequence, match: Match | None, budget: int, *, whole: bool) -> bool:
        target = self.prefill_end(sequence)
        if whole and target - (match.boundary if match is not None else 0) > budget:
            return False
        lease = self._cache.open(match, private=sequence.request.cold)
        start = lease.boundary
        end = slice_end(sequence.keys.cuts, start, target, budget)
        if end <= start or not self._cache.take_row(lease) or not self._cache.grow(lease, end):
            self._cache.close(lease)
            return False
        sequence.lease = lease
        sequence.num_cached = sequence.num_computed = start
        sequence.prefill_target = target
        sequence.snapshot_positions = dict(
            plan_snapshots(
                sequence.prompt,
                start=start,
                junction=self._cache.junction(match, sequence.keys) if match is not None else 0,
                interval=self._state_interval,
                min_gain=self._cache.config.least_gain,
                first_row=self._needs(sequence).first_row,
                learned=self._cache.places.of(sequence.keys.owners.prompt),
            )
        )
        return True

    def _record_admission(self, sequence: Sequence, match: Match, used: int | None = None) -> None:
        group, length = sequence.group, len(sequence.prompt)
        boundary = match.boundary if used is None else used
        replay = group.report is not None
        assert sequence.lease is not None
        admission = Admission(sequence, match, boundary, match.reason)
        for notice in self._hooks.on_matched:
            notice(admission)
        match = replace(match, reason=admission.reason)
        joined_tokens, joined_ms = admission.joined_tokens, admission.joined_ms
        self._cache.record(
            sequence.lease,
            match,
            length,
            used=boundary,
            replay=replay,
            joined_tokens=joined_tokens,
            joined_ms=joined_ms,
        )
        if replay:
            return
        self._cache.learn(
            sequence.lease,
            match,
            sequence.keys,
            length,
            sequence.snapshot_positions,
        )
        segments = prompt_segments(boundary, length, admission.fetched)
        group.cached_tokens = boundary
        group.report = CacheReport(
            prompt_tokens=length,
            kv_boundary=match.kv_boundary,
            state_boundary=match.state_boundary,
            boundary=boundary,
            tiers=tokens_by_tier(segments),
            reason=match.reason,
            experts_missing=admission.experts_missing,
            logprobs_reused=admission.logprobs_reused,
            weights=admission.weights,
            joined_tokens=joined_tokens,
            joined_ms=joined_ms,
            answer_tokens=match.answered if boundary else 0,
            segments=segments,
            boundary_key=boundary_key(sequence.keys, boundary),
        )
