"""Steps that only extend the one before: each of its sequences decodes one more token.

Such a step needs no plan of its own. Its numbers are columns that grow by one; Python objects
change where something happens: a block ends, an answer ends, a sequence comes. It may be planned
before the results of the step before are known, if all that it needs of them is certain: how many
tokens there are, and not which.

docs/step.md#one-step-ahead
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vlm_serve.engine.core.queues import SequenceQueues
from vlm_serve.engine.requests.plan import ChangedBlocks, Column, DecodeRows, StepPlan
from vlm_serve.engine.requests.sequence import Sequence


@dataclass(slots=True, eq=False)
class _Run:
    """Sequences that decode together, a place each.

    Attributes:
        sequences, numbers: in the order of the rows.
        state_rows, adapters: see `DecodeRows`.
        most: int64, tokens of each answer at most.
        limited: places whose next tokens are limited by rules.
    """

    sequences: list[Sequence]
    numbers: tuple[int, ...]
    state_rows: Column
    adapters: tuple[int, ...] | None
    most: Column
    limited: tuple[int, ...]

    @classmethod
    def of(cls, sequences: list[Sequence]) -> _Run:
        """Return a run of sequences that have leases."""
        leases = [sequence.lease for sequence in sequences]
        adapters = tuple([sequence.adapter_slot for sequence in sequences])
        return cls(
            sequences,
            tuple([sequence.number for sequence in sequences]),
            np.array([-1 if lease is None else lease.row for lease in leases], np.int32),
            adapters if any(slot >= 0 for slot in adapters) else None,
            np.array([each.answer.tokens_left(0) for each in sequences], np.int64),
            tuple([place for place, each in enumerate(sequences) if each.answer.is_limited]),
        )


class Extender:
    """Plans steps that extend the one before.

    Args:
        queues: sequences and their resources.
        most: maximum number of running sequences.
        state_interval: tokens between state snapshots while decoding; 0 means none.

    Attributes:
        refusals: how often a step could not be extended, by reason.
        steps, ahead: number of steps that extended another one, and of those that were planned
            before its results were known.
    """

    def __init__(self, queues: SequenceQueues, most: int, state_interval: int) -> None:
        self.refusals: Counter[str] = Counter()
        self.steps = self.ahead = 0
        self._queues = queues
        self._most = most
        self._interval = state_interval
        self._run: _Run | None = None

    def as_dict(self) -> dict[str, int | dict[str, int]]:
        """Return the counters."""
        return {"extended": self.steps, "ahead": self.ahead, "refusals": dict(self.refusals)}

    def extend(self, plan: StepPlan, *, ahead: bool) -> StepPlan | None:
        """Return the step that extends a planned one; None if there is more to do.

        Args:
            plan: the last step.
            ahead: its results are not known yet.
        """
        extended = self._extend(plan, ahead=ahead)
        if isinstance(extended, str):
            self.refusals[extended] += 1
            return None
        self.steps += 1
        self.ahead += ahead
        return extended

    def _extend(self, plan: StepPlan, *, ahead: bool) -> StepPlan | str:
        """Return the step, or why there is none."""
        rows, run = plan.rows, self._run
        if rows is not None and run is not None and run.numbers is rows.sequences:
            starts, positions = rows.starts + 1, rows.positions + 1
        elif reason := self._why_not(plan):
            return reason
        else:
            run, starts, positions = self._first(plan)
        going = (positions < run.most).tolist()
        lasting, ending = list[int](), 0
        for place, sequence in enumerate(run.sequences):
            if sequence.answer.finish_reason is None:
                if going[place]:
                    lasting.append(place)
                else:
                    ending += 1
        if len(lasting) < len(run.sequences):
            run = _Run.of([run.sequences[place] for place in lasting])
            starts, positions = starts[lasting], positions[lasting]
        if reason := self._what_else(len(lasting), len(self._queues.running) - ending):
            return reason
        return self._rows(run, starts, positions, ahead=ahead)

    def _why_not(self, plan: StepPlan) -> str:
        """Return why a step of slices cannot be extended; "" if it can."""
        for item in plan.slices:
            sequence = self._queues.find(item.sequence)
            if item.kind == "verify" or item.drafts:
                return "drafts"
            if not item.samples:
                return "prompt" if item.kind == "prefill" else "ending"
            if len(item.samples) > 1:
                return "choices"
            if item.reported_end > item.reported_start:
                return "prompt log-probabilities"
            if sequence is not None and (reason := sequence.uncertain):
                return reason
        return ""

    def _first(self, plan: StepPlan) -> tuple[_Run, Column, Column]:
        """Return the sequences of a step that have not ended, with their next rows."""
        last = [(item.sequence, item.end, item.samples[0].position + 1) for item in plan.slices]
        if (rows := plan.rows) is not None:
            following = (rows.starts + 1).tolist(), (rows.positions + 1).tolist()
            last = list(zip(rows.sequences, *following, strict=True))
        found = [(self._queues.find(number), start, position) for number, start, position in last]
        lasting = [
            (sequence, start, position)
            for sequence, start, position in found
            if sequence is not None and sequence.answer.finish_reason is None
        ]
        return (
            _Run.of([sequence for sequence, _, _ in lasting]),
            np.array([start for _, start, _ in lasting], np.int64),
            np.array([position for _, _, position in lasting], np.int64),
        )

    def _what_else(self, count: int, running: int) -> str:
        """Return what a step has to do beside `count` rows; "" if nothing.

        Args:
            count: sequences of the step.
            running: sequences that run and do not end with the step before.
        """
        queues = self._queues
        if not count:
            return "all answers end"
        if queues.suspects:
            return "failure"
        if queues.row_copies or queues.folds:
            return "choices"
        if running != count:
            return "another sequence"
        if queues.waiting and running < self._most:
            return "admission"
        return ""

    def _rows(self, run: _Run, starts: Column, positions: Column, *, ahead: bool) -> StepPlan | str:
        """Return a step of a run, with all that it needs."""
        queues, cache = self._queues, self._queues.cache
        size = cache.config.block_size
        inside = starts % size
        begins = np.flatnonzero(inside == 0).tolist()
        completes = np.flatnonzero(inside == size - 1).tolist()
        for why in queues.hooks.may_extend:
            if reason := why(len(begins), len(completes)):
                return reason
        if len(begins) > cache.available_block_count:
            return "memory"
        blocks, snapshots = self._boundaries(run, starts, begins, completes)
        tokens = None
        if not ahead:
            tokens = np.array([each.token_ids[-1] for each in run.sequences], np.int64)
        masks = tuple(
            (place, *run.sequences[place].answer.mask((), int(positions[place])))
            for place in run.limited
        )
        self._run = run
        rows = DecodeRows(
            run.numbers,
            starts,
            positions,
            run.state_rows,
            tokens,
            blocks,
            snapshots,
            tuple(mask for mask in masks if mask[1] is not None or mask[2]),
            run.adapters,
        )
        return StepPlan((), rows=rows)

    def _boundaries(
        self, run: _Run, starts: Column, begins: Iterable[int], completes: Iterable[int]
    ) -> tuple[tuple[ChangedBlocks, ...], tuple[tuple[int, int], ...]]:
        """Get blocks for the sequences that begin one, and rows for the states behind those that
        complete one; return both by place."""
        cache, blocks, snapshots = self._queues.cache, list[ChangedBlocks](), []
        leases = [sequence.lease for sequence in run.sequences]
        moved = [place for place, lease in enumerate(leases) if lease and lease.moved is not None]
        for place in sorted({*begins, *moved}):
            assert (lease := leases[place]) is not None
            first = cache.take_moved(lease)
            grown = cache.grow(lease, int(starts[place]) + 1)
            assert grown, "blocks were available"
            if first < len(lease.blocks):
                blocks.append(ChangedBlocks(place, first, tuple(lease.blocks[first:])))
        for place in completes:
            sequence, end = run.sequences[place], int(starts[place]) + 1
            lease, row = sequence.lease, None
            assert lease is not None
            if self._interval and end % self._interval == 0:
                row = cache.reserve_snapshot(lease, end, "decode")
            for offer in self._queues.hooks.plan_boundary if row is None else ():
                row = offer(sequence, end)
            if row is not None:
                snapshots.append((place, row))
        return tuple(blocks), tuple(snapshots)
