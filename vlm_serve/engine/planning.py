"""Plans a step: continuous batching of chunked prefill and decode under one token budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vlm_serve.cache.tiers.up import TierFetcher
from vlm_serve.engine.admission import Admission
from vlm_serve.engine.drafting import Drafting
from vlm_serve.engine.pacing import Pace
from vlm_serve.engine.plan import Slice, StepPlan
from vlm_serve.engine.queues import SequenceQueues, order
from vlm_serve.engine.replaying import Replays
from vlm_serve.engine.sequence import Sequence
from vlm_serve.engine.slicing import chunk_ends, slice_end


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step; everything is in tokens except the number of sequences."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    chunk_size: int
    state_interval: int
    decode_state_interval: int
    reported_tokens: int = 1 << 30
    """Prompt tokens whose log-probabilities are computed in one step; at least a block."""
    complete_experts: bool = False
    """Requests for routed experts reuse nothing whose experts are unknown."""
    speculative_tokens: int = 0
    """Drafts of a sequence in one step, at most; 0: none."""
    step_seconds: float = 0.0
    """That a step with prompts is to take; 0: no limit."""
    min_step_tokens: int = 256
    """Tokens that a step may have whatever it takes, four times as many for one sequence alone; at
    least a block."""


_SINGLE_SEQUENCE_FACTOR = 4
"""Times as many tokens at least has a step that nobody waits for yet."""
_SHORT_PROMPT_FACTOR = 4
"""Times as many tokens as a short prompt has a step must have, for it to get one of its own."""
_MAX_OVERTAKING = 8
"""Waiting prompts that a step looks at to find short ones."""


class Planner:
    """Reserves blocks, rows and embeddings for what runs next.

    Decode tokens come first, then running prefills and replays, oldest first, then admissions, and
    drafts from what is left. While a prefill needs more than the step has, a short prompt overtakes
    the rest of it: if it is much smaller than the step it gets one without the long one, whose turn
    is the next; else up to half of the step goes to prompts that fit into that as a whole. While
    there are suspects of a failed step, the first of them runs alone.

    Attributes:
        pace: limits the step.
        failures: sequences that could not be planned, with the error.
    """

    def __init__(
        self,
        queues: SequenceQueues,
        config: SchedulerConfig,
        replays: Replays,
        tiers: TierFetcher | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self._queues = queues
        self._replays = replays
        self._cache = queues.cache
        self._media = queues.media
        self._config = config
        self._drafting = drafting
        self._reports_left = 0
        self._held_back = False
        self.pace = Pace(config.step_seconds, config.min_step_tokens)
        self.failures: list[tuple[Sequence, Exception]] = []
        self._admission = Admission(
            queues.cache,
            config.state_interval,
            complete_experts=config.complete_experts,
            tiers=tiers,
        )

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run."""
        queues = self._queues
        queues.planned = []
        budget = self._config.max_num_batched_tokens
        self._reports_left = self._config.reported_tokens
        self._media.begin_step(budget)
        candidates = sorted(queues.suspects[:1] or queues.running, key=order)
        decoding: list[Sequence] = []
        later: list[Sequence] = []
        for sequence in candidates:
            (later if sequence.prefilling or sequence.replaying else decoding).append(sequence)
        for sequence in decoding:
            budget -= self._grant(sequence, budget)
        if later or queues.waiting:
            budget -= self._grant_prompts(later, self._prompt_limit(budget, later))
        if self._drafting is not None:
            self._drafting.extend(max(0, budget))
        for item in queues.planned:
            if item.kind == "decode":
                queues.fold(queues[item.sequence])
        if not queues.planned:
            return None
        leases = [queues[item.sequence].lease for item in queues.planned]
        return StepPlan(
            slices=tuple(queues.planned),
            encodes=self._media.take_encodes(),
            recalled=self._media.take_recalled(),
            copies=tuple(copy for lease in leases if lease is not None for copy in lease.copies),
            row_copies=tuple(queues.row_copies),
            dropped_slots=self._media.take_dropped(),
            folds=tuple(queues.folds),
            skip_mtp=self._drafting is not None and self._drafting.skip_mtp,
        )

    def _prompt_limit(self, budget: int, running: list[Sequence]) -> int:
        """Prompt tokens of this step, of those for which there is room. The oldest prefill has
        most of them."""
        queues = self._queues
        alone = len(queues.running) + len(queues.waiting) <= 1
        least = self._config.min_step_tokens * (_SINGLE_SEQUENCE_FACTOR if alone else 1)
        decodes = self._config.max_num_batched_tokens - budget
        start = next((each.num_computed for each in running if each.prefilling), 0)
        return min(budget, max(self.pace.most(start) - decodes, least))

    def _grant_prompts(self, running: list[Sequence], budget: int) -> int:
        """Plans slices of running prefills and replays, and admits what waits; returns the tokens
        planned."""
        left, kept = budget, 0
        prefills = [each for each in running if each.prefilling]
        held_back, self._held_back = self._held_back, False
        if self._may_be_overtaken(prefills, budget):
            if not held_back:
                short = self._find_overtaking(prefills[0], budget // _SHORT_PROMPT_FACTOR)
                taken = budget - self._admit(budget, short)
                if taken:
                    self._held_back = True
                    return taken
            most = max(0, min(budget // 2, budget - self._config.block_size))
            kept = min(most, sum(each.num_tokens for each in self._find_overtaking(prefills[0])))
        for sequence in running:
            left -= self._grant(sequence, left - kept)
        # Where prefills wait for something themselves, there is room for long prompts too.
        whole = kept > 0 and left - kept < self._config.block_size
        prefills = [each for each in self._queues.running if each.prefilling] if whole else []
        beside = self._find_overtaking(min(prefills, key=order)) if prefills else None
        return budget - self._admit(left, beside)

    def _may_be_overtaken(self, prefills: list[Sequence], budget: int) -> bool:
        """Whether running prefills need more than a step, and there is a seat for others."""
        queues = self._queues
        needed = sum(each.prefill_target - each.num_computed for each in prefills)
        full = len(queues.running) >= self._config.max_num_seqs
        return bool(needed) and needed > budget and not queues.suspects and not full

    def _find_overtaking(self, prefill: Sequence, most: int | None = None) -> list[Sequence]:
        """Of what waits, what may overtake a prefill: nothing of a lower priority, and of no more
        than so many tokens."""
        found: list[Sequence] = []
        for sequence in self._queues.waiting:
            lower = sequence.request.priority > prefill.request.priority
            if lower or len(found) == _MAX_OVERTAKING:
                break
            free = sequence.overtakes and not sequence.fetching and sequence.lease is None
            if free and (most is None or sequence.num_tokens <= most):
                found.append(sequence)
        return found

    def _admit(self, budget: int, short: list[Sequence] | None) -> int:
        """Admits what waits; returns the budget that is left.

        Args:
            budget: tokens.
            short: only these, and only those of them that it covers whole; None: whoever comes.
        """
        queues, most, whole = self._queues, budget, short is not None
        waiting = short
        if waiting is None:
            waiting = queues.suspects[:1] or list(queues.waiting)
        for sequence in waiting:
            if sequence.lease is not None or sequence.fetching:
                continue
            if not self._replays.may_start(sequence):
                continue  # nor for those that replay
            if sequence.suspect_until:
                self._preempt_all()
            full = len(queues.running) >= self._config.max_num_seqs
            if budget <= 0 or full:
                return budget
            alone = not queues.running
            if not self._admission.admit(sequence, budget, alone=alone, whole=whole):
                if sequence.fetching:
                    continue  # others need not wait for what comes up for this one
                if not whole:
                    return budget
                sequence.overtakes = budget < most
                continue
            queues.start(sequence)
            budget -= self._grant(sequence, budget)
        return budget

    def _preempt_all(self) -> None:
        """A suspect runs alone. The others wait for it anyway, so they may as well make room."""
        for other in sorted(self._queues.running, key=order, reverse=True):
            self._queues.preempt(other)

    def _grant(self, sequence: Sequence, budget: int) -> int:
        """Plans what comes next for a sequence; returns the tokens planned. Pictures and grammars
        are a request's own: where one of them fails, it is left out and noted in `failures`."""
        try:
            if sequence.prefilling:
                return self._grant_prefill(sequence, budget)
            return self._grant_decode(sequence, budget)
        except AssertionError:
            raise
        except Exception as error:
            self.failures.append((sequence, error))
            return 0

    def _grant_decode(self, sequence: Sequence, budget: int) -> int:
        """Plans one decode token, or what is replayed if the budget allows it; returns the tokens
        planned."""
        if sequence.replaying and budget <= 0:
            return 0
        if sequence.lease is None or not self._ensure_blocks(sequence, sequence.num_computed + 1):
            return 0
        start = sequence.num_computed
        end = start + 1
        interval = self._config.decode_state_interval
        snapshots = self._reserve(sequence, (end,)) if interval and end % interval == 0 else ()
        item = self._slice(sequence, start, end, snapshots)
        if sequence.replaying:
            item = self._replays.extended(item, budget - 1)
        self._queues.planned.append(item)
        return item.end - start

    def _grant_prefill(self, sequence: Sequence, budget: int) -> int:
        """Plans the next slice of a prefill if budget and blocks allow it; returns its tokens."""
        if sequence.lease is None or budget <= 0:
            return 0
        config, cuts = self._config, sequence.keys.cuts
        start = sequence.num_computed
        log = sequence.group.prompt_log if sequence.group.wanted_rows is not None else None
        if log is not None:
            budget = min(budget, log.next - 1 - start + self._reports_left)
        end = slice_end(cuts, start, sequence.prefill_target, budget)
        end = self._media.clip(sequence, start, end)
        if end <= start or not self._ensure_blocks(sequence, end):
            return 0
        ends = chunk_ends(cuts, start, end, config.block_size, config.chunk_size)
        wanted = [p for p in sequence.snapshot_positions if start < p <= end]
        reported = log.to_report(start, end) if log is not None else (0, 0)
        self._reports_left -= max(0, reported[1] - reported[0])
        embeddings = self._media.acquire(sequence, start, end)
        snapshots = self._reserve(sequence, wanted)
        self._queues.planned.append(
            self._slice(
                sequence, start, end, snapshots, ends=ends, embeddings=embeddings, reported=reported
            )
        )
        return end - start

    def _ensure_blocks(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grows the lease; preempts sequences that replay, and then those that come later in order,
        until it fits."""
        assert sequence.lease is not None
        queues = self._queues
        while not self._cache.grow(sequence.lease, num_tokens):
            last = max(queues.running, key=lambda each: (each.replaying, order(each)))
            assert len(queues.running) > 1, "one sequence always fits: checked when submitted"
            queues.preempt(last)
            if last is sequence:
                return False
        return True

    def _reserve(self, sequence: Sequence, positions: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Rows for state snapshots, most important first; one without a row is skipped."""
        assert sequence.lease is not None
        reserved = []
        for position in positions:
            kind = sequence.snapshot_positions.get(position, "decode")
            row = self._cache.reserve_snapshot(sequence.lease, position, kind)
            if row is not None:
                reserved.append((position, row))
        return tuple(sorted(reserved))

    def _slice(
        self,
        sequence: Sequence,
        start: int,
        end: int,
        snapshots: tuple[tuple[int, int], ...],
        *,
        ends: tuple[int, ...] = (),
        embeddings: tuple[tuple[int, int, int, int], ...] = (),
        reported: tuple[int, int] = (0, 0),
    ) -> Slice:
        lease, known = sequence.lease, len(sequence.prompt)
        assert lease is not None
        first_block = sequence.settled_blocks if lease.committed else 0
        tasks = []
        if end == sequence.num_tokens:
            tasks = [each.sample_task() for each in (sequence, *sequence.pending_forks)]
        return Slice(
            sequence=sequence.number,
            kind="prefill" if ends else "decode",
            token_ids=tuple(sequence.token_ids[max(start, known) : end]),
            start=start,
            end=end,
            src_row=lease.src_row,
            dst_row=lease.row,
            first_block=first_block,
            blocks=tuple(lease.blocks[first_block:]),
            write_start=lease.shared_tokens,
            chunk_ends=ends,
            snapshots=snapshots,
            embeddings=embeddings,
            samples=tuple(tasks),
            reported_start=reported[0],
            reported_end=reported[1],
        )
