"""Adds drafts behind the decode tokens of a step, from the remaining budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Tokens
from dataclasses import replace
from typing import NamedTuple

from vlm_serve.engine.core.hooks import CommittedRow
from vlm_serve.engine.core.queues import SequenceQueues
from vlm_serve.engine.core.slicing import max_drafts
from vlm_serve.engine.features.drafts.base import Drafter, MtpDrafter
from vlm_serve.engine.features.drafts.lengths import (
    AcceptanceTracker,
    Candidate,
    CostCurve,
    depths,
    share,
)
from vlm_serve.engine.features.drafts.suffix import SuffixDrafter
from vlm_serve.engine.requests.plan import Slice, StepOutput, StepPlan
from vlm_serve.engine.requests.sequence import Sequence

PROBED_STEPS = 16
"""Number of steps that measure the cost of one way."""
_MIN_PERIOD, _MAX_PERIOD = 256, 8192
_OUTLIER = 4.0
"""Cap on a step's duration, as a multiple of the median: the machine was busy otherwise."""


class PayoffProbe:
    """Alternates a feature on and off, then keeps the cheaper way for a while. After that it tries
    the other way again, at longer and longer intervals as long as the result stays the same.

    Attributes:
        on: True if the next step uses the feature.
    """

    def __init__(self) -> None:
        self.on = True
        self._lately = deque[tuple[float, float]](maxlen=PROBED_STEPS)
        self._costs: dict[bool, float] = {}
        self._settled: bool | None = None
        self._left, self._period = PROBED_STEPS, _MIN_PERIOD

    def learn(self, seconds: float, tokens: float) -> None:
        """Record the duration of a step (in any unit) and the tokens that it made. The step was
        made as `on` said."""
        self._lately.append((seconds, tokens))
        self._left -= 1
        if self._left:
            return
        self._costs[self.on] = self._cost()
        self._lately.clear()
        if self._settled == self.on or len(self._costs) < 2:
            self.on, self._left = not self.on, PROBED_STEPS
        else:
            self._settle(self._costs[True] <= self._costs[False])

    def _settle(self, on: bool) -> None:
        again = self._settled == on
        self._period = min(2 * self._period, _MAX_PERIOD) if again else _MIN_PERIOD
        self.on = self._settled = on
        self._left = self._period

    def _cost(self) -> float:
        """Return the mean cost per token of the latest steps."""
        most = _OUTLIER * sorted(seconds for seconds, _ in self._lately)[len(self._lately) // 2]
        seconds = sum(min(seconds, most) for seconds, _ in self._lately)
        return seconds / sum(tokens for _, tokens in self._lately)


class DraftCounts:
    """Counters of drafts.

    Attributes:
        drafts: number of verified slices.
        draft_tokens, accepted_tokens: numbers of drafted and of accepted tokens.
        accepted_per_position: accepted tokens by their position behind the sampled token.
    """

    def __init__(self, most: int) -> None:
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.accepted_per_position = [0] * most

    def add(self, drafted: int, accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        for place in range(accepted):
            self.accepted_per_position[place] += 1

    def as_dict(self) -> dict[str, int | list[int]]:
        return dict(vars(self))


class DraftSource(NamedTuple):
    """Source of a sequence's latest drafts: the index of the drafter, and the evidence for the
    first draft."""

    drafter: int = 0
    evidence: int = 0


class Drafting:
    """Adds drafts to steps. Drafts displace nothing: they use budget, free blocks and context that
    are left over in a step. They end where a state snapshot is wanted, since only a decode token
    leaves one.

    Args:
        queues: provides the planned slices, which drafts extend.
        drafters: sources of drafts; for each sequence, the most promising drafts win.
        most: maximum number of drafts per sequence and step, unless few run; see `max_drafts`.
        sequences: maximum number of running sequences.
        costs: duration of a step by its rows and sequences.
        pass_costs: duration of a pass of the MTP layer, by number of sequences.
        state_interval: tokens between state snapshots while decoding; 0 means none.
        never: tokens that are never drafted.

    Attributes:
        counts: counters of drafts.
        drafters: the given drafters.
        payoff_probe: tells whether the MTP layer pays; None means it is used in any case, if at
            all.
    """

    def __init__(
        self,
        queues: SequenceQueues,
        drafters: Tokens[Drafter],
        *,
        most: int,
        sequences: int,
        costs: CostCurve,
        pass_costs: CostCurve | None = None,
        state_interval: int,
        never: frozenset[int],
    ) -> None:
        self.counts = DraftCounts(max_drafts(most, 1, sequences))
        self.costs = costs
        self.pass_costs = pass_costs
        self.drafters = list(drafters)
        self.payoff_probe = (
            PayoffProbe() if any(isinstance(one, MtpDrafter) for one in drafters) else None
        )
        self._queues = queues
        self._most, self._sequences = most, sequences
        self._interval = state_interval
        self._never = never
        self._acceptance = AcceptanceTracker()
        self._sources: dict[int, DraftSource] = {}
        self._ended: list[Sequence] = []

    @property
    def num_bytes(self) -> int:
        """Memory of earlier answers."""
        return sum(one.num_bytes for one in self.drafters if isinstance(one, SuffixDrafter))

    def plan_drafts(self, budget: int) -> None:
        """Turn planned decode tokens into slices with drafts. Request drafts of the MTP layer for
        sequences without others.

        Args:
            budget: number of tokens that may be added.
        """
        self._forget_ended()
        planned = self._queues.planned
        skip_mtp = (
            self.payoff_probe is not None
            and not self.payoff_probe.on
            and not any(item.kind == "prefill" for item in planned)
        )
        self._queues.skip_mtp = skip_mtp
        if skip_mtp and len(self.drafters) == 1:
            return
        proposals = [
            self._propose(item, budget) if item.kind == "decode" else () for item in planned
        ]
        rows = sum(item.end - item.start for item in planned)
        decodes = sum(item.kind == "decode" for item in planned)
        lengths = share(
            [
                self._candidate(item, drafts)
                for item, drafts in zip(planned, proposals, strict=True)
            ],
            rows=rows,
            decodes=decodes,
            budget=budget,
            costs=self.costs,
        )
        for place, (item, drafts, length) in enumerate(
            zip(planned, proposals, lengths, strict=True)
        ):
            if length:
                planned[place] = self._queues.verify_slice(item, drafts[:length])
        for drafter, source in enumerate(self.drafters):
            if isinstance(source, MtpDrafter) and not skip_mtp:
                known = {
                    item.sequence
                    for item, drafts in zip(planned, proposals, strict=True)
                    if drafts and self._sources[item.sequence].drafter != drafter
                }
                self._request_mtp_drafts(drafter, known)

    def may_extend(self, blocks: int, rows: int) -> str:
        """Return "drafts": which ones are verified follows from what was sampled."""
        return "drafts"

    def on_learned(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        """Record the duration of a whole step, to find out whether the passes of the MTP layer pay.
        Steps with prompts are skipped: they say nothing about that."""
        if self.payoff_probe is None or any(item.kind == "prefill" for item in plan.slices):
            return
        count = len(plan.slices)
        tokens = sum(map(len, output.sampled.values()))
        self.payoff_probe.learn(seconds / self.costs.seconds(count, count), tokens / count)

    def on_committed(self, rows: list[CommittedRow], output: StepOutput) -> None:
        """Record how many drafts were accepted, and store those that the MTP layer has made."""
        for sequence, item, accepted in rows:
            number = item.sequence
            if item.kind == "verify" and item.samples[0].forced is None:
                drafted = len(item.samples) - 1
                agreed = min(accepted, len(output.sampled[number]) - 1)
                self._acceptance.learn(sequence, *self._sources[number], drafted, agreed)
                self.counts.add(drafted, agreed)
            if item.drafts and sequence.lease is not None:
                self.take(sequence, output.drafts[number])
        self._forget_ended()

    def take(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Store the drafts that the MTP layer made behind all of a sequence's tokens."""
        for drafter in self.drafters:
            if isinstance(drafter, MtpDrafter):
                drafter.take(sequence, drafts)

    def on_ended(self, sequence: Sequence) -> None:
        """Drop the data of a finished sequence, once its last step has been looked at."""
        self._ended.append(sequence)

    def _forget_ended(self) -> None:
        ended, self._ended = self._ended, []
        for sequence in ended:
            self._acceptance.forget(sequence)
            self._sources.pop(sequence.number, None)
            for drafter in self.drafters:
                drafter.forget(sequence)

    def _propose(self, item: Slice, budget: int) -> tuple[int, ...]:
        sequence = self._queues[item.sequence]
        limit = max_drafts(self._most, len(self._queues.running), self._sequences)
        limit = min(limit, budget, self._queues.verify_capacity(item, self._interval))
        if limit <= 0 or self._skips_drafts(sequence):
            return ()
        best, most = tuple[int, ...](), 0.0
        for place, drafter in enumerate(self.drafters):
            drafts = self._allowed(drafter.propose(sequence, limit))
            if not drafts:
                continue
            source = DraftSource(place, drafter.evidence(sequence))
            expected = self._acceptance.of(sequence, place).expected_accepted(
                len(drafts), source.evidence
            )
            if expected > most:
                best, most, self._sources[item.sequence] = drafts, expected, source
        return best

    def _candidate(self, item: Slice, drafts: tuple[int, ...]) -> Candidate:
        drafter, evidence = self._sources.get(item.sequence, DraftSource())
        return Candidate(
            self._acceptance.of(self._queues[item.sequence], drafter), len(drafts), evidence
        )

    @staticmethod
    def _skips_drafts(sequence: Sequence) -> bool:
        """Return True if the sequence gets no drafts. Forced tokens need none."""
        return sequence.request.cold or sequence.replaying or sequence.suspect_until > 0

    def _allowed(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        for place, token in enumerate(drafts):
            if token in self._never:
                return drafts[:place]
        return drafts

    def _request_mtp_drafts(self, drafter: int, known: set[int]) -> None:
        """Request MTP drafts behind the planned slices that sample, except for the `known`
        sequences."""
        planned, requested = self._queues.planned, list[tuple[int, int]]()
        for place, item in enumerate(planned):
            sequence = self._queues[item.sequence]
            several = {task.sequence for task in item.samples} != {item.sequence}
            if several or self._skips_drafts(sequence):
                continue
            limit = min(self._most, sequence.answer.tokens_left(sequence.num_generated + 1) - 1)
            if limit > 0 and item.sequence not in known:
                requested.append((place, limit))
        acceptances = [
            self._acceptance.of(self._queues[planned[place].sequence], drafter)
            for place, _ in requested
        ]
        limits = [limit for _, limit in requested]
        lengths = depths(acceptances, limits, costs=self.costs, pass_costs=self.pass_costs)
        for (place, _), length in zip(requested, lengths, strict=True):
            planned[place] = self._reserve_drafts(planned[place], length)

    def _reserve_drafts(self, item: Slice, length: int) -> Slice:
        """Return the slice with blocks for `length` drafts, or for as many as blocks are free."""
        lease, cache = self._queues[item.sequence].lease, self._queues.cache
        assert lease is not None
        blocks = len(lease.blocks) + cache.free_block_count
        length = min(length, blocks * cache.config.block_size - item.end)
        if length <= 0:
            return item
        grown = cache.grow(lease, item.end + length)
        assert grown, "there are free blocks"
        return replace(item, drafts=length, blocks=tuple(lease.blocks[item.first_block :]))
