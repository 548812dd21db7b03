"""Step planner: continuous batching of chunked prefill and decode under one token budget.

The prompt tokens of a step are limited by time too, since other sequences wait for its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Literal

from vlm_serve.engine.core.admission import Admitter
from vlm_serve.engine.core.queues import SequenceQueues, order
from vlm_serve.engine.core.slicing import chunk_ends, slice_end
from vlm_serve.engine.requests.plan import Slice, StepPlan
from vlm_serve.engine.requests.sequence import Sequence

_DECAY = 0.8
"""Weight of all earlier steps after each further step (exponential decay)."""
_DEPTH_DECAY = 0.98
"""Decay for the cost of depth; slower, since one step says little about it."""
_MIN_SPREAD = 0.02
"""Minimum relative spread of depths for an estimate of the cost of depth."""
_MIN_DEPTH = 256.0
"""Lower bound of `doubling`: attention to this many tokens costs no more than the rest of a token's
work."""
_UNLIMITED = 1 << 30


class _Depths:
    """Cost of a token by its context length: least-squares fit of `a + b * context` to the time per
    token of each step, with exponential decay."""

    def __init__(self) -> None:
        self._steps = self._context = self._square = self._cost = self._both = 0.0
        self.doubling = math.inf
        """Context length at which attention costs as much as all other work; infinite while
        unknown."""

    def learn(self, context: float, cost: float) -> None:
        """Record a step with a mean cost of `cost` per token and a mean context of `context`
        tokens."""
        self._steps = _DEPTH_DECAY * self._steps + 1
        self._context = _DEPTH_DECAY * self._context + context
        self._square = _DEPTH_DECAY * self._square + context * context
        self._cost = _DEPTH_DECAY * self._cost + cost
        self._both = _DEPTH_DECAY * self._both + context * cost
        spread = self._steps * self._square - self._context**2
        if spread <= _MIN_SPREAD * self._steps * self._square:
            return
        flat = self._cost * self._square - self._both * self._context
        slope = self._both * self._steps - self._cost * self._context
        if slope <= 0:
            self.doubling = math.inf
        else:
            self.doubling = max(_MIN_DEPTH, flat / slope)


class Pace:
    """Estimates how many tokens fit into the target duration of a step, from recent steps. A token
    deep in a long prompt costs more than one at its start.

    Measured times may decide where prompts are cut: cuts change no bit of an answer.

    Args:
        seconds: target duration of a step; 0 means no limit.
        least: tokens that a step may always have: smaller steps waste time.
    """

    def __init__(self, seconds: float, least: int) -> None:
        self._target = seconds
        self._least = least
        self._depths = _Depths()
        self._work = 0.0
        self._seconds = 0.0
        self._queued = False

    def learn(self, plan: StepPlan, seconds: float, *, awaited: bool = True) -> None:
        """Record the duration of a step. Skip steps with few tokens or with media to encode: they
        say little about the cost of a token.

        Args:
            plan: the step.
            seconds: from its plan to its output.
            awaited: False if it was only queued. Then the next awaited step has waited for both,
                and neither says what it cost.
        """
        tokens, queued = plan.num_tokens, self._queued
        self._queued = not awaited
        if queued or not awaited:
            return
        if 2 * tokens < self._least or plan.encodes:
            return
        looked = sum((item.end - item.start) * (item.start + item.end) / 2 for item in plan.slices)
        if plan.rows is not None:
            looked = float(plan.rows.starts.sum()) + tokens / 2
        self._depths.learn(looked / tokens, seconds / tokens)
        self._work = _DECAY * self._work + tokens + looked / self._depths.doubling
        self._seconds = _DECAY * self._seconds + seconds

    def most(self, start: int) -> int:
        """Return the token limit of the next step; unlimited while nothing is known.

        Args:
            start: position of the step's first token in its prompt.
        """
        if not self._target or not self._seconds:
            return _UNLIMITED
        # Solve n * (1 + (start + n / 2) / doubling) = work for n.
        work, doubling = self._target * self._work / self._seconds, self._depths.doubling
        at_start = 1 + start / doubling
        fit = 2 * work / (at_start + math.sqrt(at_start * at_start + 2 * work / doubling))
        return max(self._least, int(fit))


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step, in tokens unless the name says otherwise."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    chunk_size: int
    state_interval: int
    decode_state_interval: int
    reported_tokens: int = 1 << 30
    """Maximum number of prompt tokens whose log-probabilities one step computes; at least a
    block."""
    complete_experts: bool = False
    """If True, requests for routed experts do not reuse tokens without recorded experts."""
    speculative_tokens: int = 0
    """Maximum number of drafts per sequence and step; 0 disables drafts."""
    step_seconds: float = 0.0
    """Target duration of a step with prompt tokens, in seconds; 0 means no limit."""
    extends_steps: bool = False
    """Whether a step that only extends the one before is planned as columns."""
    answer_ends: Literal["auto", "always", "off"] = "off"
    """Whether the states at the ends of answers are kept."""
    min_step_tokens: int = 256
    """Tokens that a step may have regardless of its duration; at least a block. Four times as many
    if a single sequence is active."""


_SINGLE_SEQUENCE_FACTOR = 4
"""A step that serves a single sequence may exceed the token limit by this factor."""
_SHORT_PROMPT_FACTOR = 4
"""A prompt is short enough for its own step if the step's budget is at least this many times
larger."""
_MAX_OVERTAKING = 8
"""Maximum number of waiting prompts per step that may overtake a long prefill."""


class Planner:
    """Reserves blocks, state rows and embeddings for the next step.

    The order is: decode tokens, running prefills and replays (oldest first), admissions, then
    drafts from the remaining budget.

    Short prompts overtake a prefill that needs more than one step. A prompt much smaller than the
    step gets its own step, without the long prefill; the next step is the long prefill's again.
    Otherwise, up to half of the step goes to prompts that fit into this half completely.

    Features may put some sequences before others, prompts that wait before running prefills too,
    and have running sequences give up their seats.

    After a failed step, its sequences are suspects. While there are suspects, the first of them
    runs alone.

    Args:
        queues: sequences and their resources, with the features that add to a step.
        admitter: gives waiting sequences their leases.
        config: limits.

    Attributes:
        pace: limits the prompt tokens of a step by its expected duration.
        failures: sequences that could not be planned, each with its error.
        refused: the waiting sequence that found no space in the last plan; None: all did, or none
            had its turn.
    """

    def __init__(self, queues: SequenceQueues, admitter: Admitter, config: SchedulerConfig) -> None:
        self._queues = queues
        self._hooks = queues.hooks
        self._cache = queues.cache
        self._media = queues.media
        self._config = config
        self._held_back = False
        self.pace = Pace(config.step_seconds, config.min_step_tokens)
        self.failures: list[tuple[Sequence, Exception]] = []
        self.refused: Sequence | None = None
        self._admitter = admitter

    def plan(self) -> StepPlan | None:
        """Plan the next step; return None if nothing can run."""
        kept = len(self._queues.kept)
        plan = self._plan()
        if plan is None and len(self._queues.kept) < kept:
            plan = self._plan()  # sequences may have waited for what was given up
        return plan

    def _plan(self) -> StepPlan | None:
        queues, hooks = self._queues, self._hooks
        queues.begin_plan()
        self.refused = None
        budget = self._config.max_num_batched_tokens
        kept = len(queues.running) + self._config.block_size
        for offer in hooks.plan_open[:]:
            budget -= offer(budget - kept)
        self._media.begin_step(budget)
        candidates = sorted(queues.suspects[:1] or queues.running, key=order)
        decoding: list[Sequence] = []
        later: list[Sequence] = []
        for sequence in candidates:
            (later if sequence.prefilling or sequence.replaying else decoding).append(sequence)
        for sequence in decoding:
            budget -= self._grant(sequence, budget)
        if later or queues.waiting:
            later = list(self._in_turn(later, []))
            budget -= self._grant_prompts(later, self._prompt_limit(budget, later))
        for add_drafts in hooks.plan_drafts:
            add_drafts(max(0, budget))
        for add_copies in hooks.plan_trail:
            add_copies()
        for item in queues.planned:
            if item.kind == "decode":
                queues.fold(queues[item.sequence])
        due = [add_last() for add_last in hooks.plan_close]
        if not queues.planned and not any(due):
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
            partial_folds=queues.partial_folds,
            skip_mtp=queues.skip_mtp,
        )

    def _prompt_limit(self, budget: int, running: list[Sequence]) -> int:
        """Return the maximum number of prompt tokens of this step; at most `budget`. The oldest
        prefill is expected to take most of them."""
        queues = self._queues
        alone = len(queues.running) + len(queues.waiting) - len(queues.followers) <= 1
        least = self._config.min_step_tokens * (_SINGLE_SEQUENCE_FACTOR if alone else 1)
        decodes = self._config.max_num_batched_tokens - budget
        start = next((sequence.num_computed for sequence in running if sequence.prefilling), 0)
        return min(budget, max(self.pace.most(start) - decodes, least))

    def _grant_prompts(self, running: list[Sequence], budget: int) -> int:
        """Plan slices of running prefills and replays, and admit waiting sequences. Return the
        number of tokens planned."""
        self._offer_prompts()
        prefills = [sequence for sequence in running if sequence.prefilling]
        first = self._admit(budget, self._before(prefills))
        return budget - first + self._grant_others(running, first)

    def _grant_others(self, running: list[Sequence], budget: int) -> int:
        """Do the same behind those whose turn comes before that of the running prefills."""
        left, kept = budget, 0
        prefills = [prefill for prefill in running if prefill.prefilling and prefill.lease]
        held_back, self._held_back = self._held_back, False
        if self._may_be_overtaken(prefills, budget):
            if not held_back:
                short = self._find_overtaking(prefills[0], budget // _SHORT_PROMPT_FACTOR)
                taken = budget - self._admit(budget, short, whole=True)
                if taken:
                    self._held_back = True
                    return taken
            most = max(0, min(budget // 2, budget - self._config.block_size))
            overtaking = self._find_overtaking(prefills[0])
            kept = min(most, sum(sequence.num_tokens for sequence in overtaking))
        for sequence in running:
            left -= self._grant(sequence, left - kept)
        self._offer_prompts()
        # Prefills that are blocked leave budget unused: spend it on waiting prompts of any length.
        whole = kept > 0 and left - kept < self._config.block_size
        blocked = [sequence for sequence in self._queues.running if whole and sequence.prefilling]
        passing = self._find_overtaking(min(blocked, key=order)) if blocked else None
        if passing is not None:
            return budget - self._admit(left, passing, whole=True)
        queues = self._queues
        waiting = queues.suspects[:1] or self._in_turn([], queues.waiting)
        return budget - self._admit(left, waiting)

    def _in_turn(self, running: list[Sequence], waiting: list[Sequence]) -> Iterable[Sequence]:
        """Return the running sequences, and the waiting ones if any are given, in the order in
        which they may have what is left of the step."""
        for take in self._hooks.take_turns:
            return take(running, waiting)
        return (*running, *waiting)

    def _before(self, prefills: list[Sequence]) -> Iterable[Sequence]:
        """Return the waiting sequences whose turn comes before that of the running prefills."""
        waiting = self._queues.waiting
        if not prefills or not waiting or self._queues.suspects or not self._hooks.take_turns:
            return ()
        turns = self._in_turn(prefills, waiting)
        return takewhile(lambda sequence: sequence not in prefills, turns)

    def _offer_prompts(self) -> None:
        for offer in self._hooks.plan_prompts:
            offer()

    def _may_be_overtaken(self, prefills: list[Sequence], budget: int) -> bool:
        """Return True if the running prefills need more than this step and another sequence may
        start."""
        queues = self._queues
        needed = sum(prefill.prefill_target - prefill.num_computed for prefill in prefills)
        full = len(queues.running) >= self._config.max_num_seqs
        return bool(needed) and needed > budget and not queues.suspects and not full

    def _find_overtaking(self, prefill: Sequence, most: int | None = None) -> list[Sequence]:
        """Return the waiting sequences that may overtake a prefill, in order. Sequences of lower
        priority and prompts longer than `most` tokens are left out."""
        overtaking: list[Sequence] = []
        for sequence in self._queues.waiting:
            lower = sequence.priority > prefill.priority
            if lower or len(overtaking) == _MAX_OVERTAKING:
                break
            free = sequence.overtakes and not self._queues.is_held(sequence)
            free = free and (most is None or sequence.num_tokens <= most)
            if free and all(may(sequence, prefill) for may in self._hooks.may_overtake):
                overtaking.append(sequence)
        return overtaking

    def _admit(self, budget: int, waiting: Iterable[Sequence], *, whole: bool = False) -> int:
        """Admit waiting sequences; return the remaining budget.

        Args:
            budget: tokens.
            waiting: admit only these.
            whole: admit each only if its whole prompt fits.
        """
        queues, most = self._queues, budget
        for sequence in waiting:
            if queues.is_held(sequence):
                continue  # the sequences behind it need not wait for a tier or a leader
            if not self._may_start(sequence):
                continue  # the sequences behind it need not wait for what it waits for
            if sequence.suspect_until:
                self._preempt_all()
            full = len(queues.running) >= self._config.max_num_seqs
            if budget <= 0 or (full and (whole or not self._vacate(sequence, budget))):
                return budget
            alone = not queues.running
            admit = partial(self._admitter.admit, sequence, budget, alone=alone, whole=whole)
            admitted = admit()
            lacking = not (admitted or sequence.fetching or whole)
            if lacking and budget >= self._config.block_size and queues.reclaim():
                admitted = admit()
            if not admitted:
                if sequence.fetching:
                    continue
                if not whole:
                    self.refused = sequence
                    return budget
                sequence.overtakes = budget < most
                continue
            queues.start(sequence)
            budget -= self._grant(sequence, budget)
            self._offer_prompts()
        return budget

    def _vacate(self, sequence: Sequence, budget: int) -> bool:
        """Have a running sequence give up its seat for a waiting one, if any does and the budget is
        enough for it to begin."""
        enough = budget >= self._config.block_size
        return enough and any(give(sequence) for give in self._hooks.give_seat)

    def _may_start(self, sequence: Sequence) -> bool:
        """Return True unless a feature has a sequence wait, or ends it with an error."""
        try:
            return all(may(sequence) for may in self._hooks.may_start)
        except AssertionError:
            raise
        except Exception as error:
            self.failures.append((sequence, error))
            return False

    def _preempt_all(self) -> None:
        """Preempt every running sequence: a suspect runs alone. The others would wait anyway, so
        their blocks may as well be free."""
        for other in sorted(self._queues.running, key=order, reverse=True):
            self._queues.preempt(other)

    def _grant(self, sequence: Sequence, budget: int) -> int:
        """Plan the next slice of a sequence; return the number of tokens planned. Media and
        grammars belong to a single request. If one of them raises, skip the sequence and add it to
        `failures`."""
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
        """Plan one decode token, or several forced tokens of a replay if the budget allows. Return
        the number of tokens planned."""
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
            for extend in self._hooks.plan_decode:
                item = extend(sequence, item, budget - 1)
        self._queues.planned.append(item)
        return item.end - start

    def _grant_prefill(self, sequence: Sequence, budget: int) -> int:
        """Plan the next slice of a prefill, limited by budget and blocks. Return the number of
        tokens planned."""
        if sequence.lease is None or budget <= 0:
            return 0
        config, cuts = self._config, sequence.keys.cuts
        start = sequence.num_computed
        for limit in self._hooks.may_prefill:
            budget = limit(sequence, budget)
        end = slice_end(cuts, start, sequence.prefill_target, budget)
        end = self._media.clip(sequence, start, end)
        if end <= start or not self._ensure_blocks(sequence, end):
            return 0
        ends = chunk_ends(cuts, start, end, config.block_size, config.chunk_size)
        wanted = [p for p in sequence.snapshot_positions if start < p <= end]
        embeddings = self._media.acquire(sequence, start, end)
        snapshots = self._reserve(sequence, wanted)
        item = self._slice(sequence, start, end, snapshots, ends=ends, embeddings=embeddings)
        for extend in self._hooks.plan_prefill:
            item = extend(sequence, item)
        self._queues.planned.append(item)
        return end - start

    def _ensure_blocks(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow the lease to `num_tokens`; preempt other sequences until it fits. Replaying
        sequences are preempted first, then those that features choose, then the last ones in
        scheduling order. Nobody gives up blocks whose prompt is in the step already. Return
        False if the sequence itself was preempted."""
        assert sequence.lease is not None
        queues = self._queues
        while not self._cache.grow(sequence.lease, num_tokens):
            if queues.reclaim():
                continue
            assert len(queues.running) > 1, "one sequence always fits: checked when submitted"
            candidates = [other for other in queues.running if other.replaying] or queues.running
            chosen = [choose(candidates) for choose in self._hooks.plan_victim]
            last = next(filter(None, chosen), None) or max(candidates, key=order)
            if any(item.kind == "prefill" for item in queues.planned_of(last)):
                last = sequence  # the other's turn came first, and its part of the step stays
            queues.preempt(last)
            if last is sequence:
                return False
        return True

    def _reserve(self, sequence: Sequence, positions: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Reserve rows for state snapshots, most important position first; skip positions without a
        free row. Return (position, row) pairs, ascending."""
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
    ) -> Slice:
        lease, known = sequence.lease, len(sequence.prompt)
        assert lease is not None
        first_block = sequence.settled_blocks if lease.committed else 0
        tasks = []
        if end == sequence.num_tokens:
            tasks = [choice.sample_task() for choice in (sequence, *sequence.pending_forks)]
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
            adapter=sequence.adapter_slot,
        )
