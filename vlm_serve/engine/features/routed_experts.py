"""Routed experts of mixture-of-experts models, collected for the requests that ask for them.

The rows of a choice may come from its own steps or from the cache, which keeps those of all tokens
of a step that computed any.

docs/architecture.md#routed-experts
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import replace

import numpy as np

from vlm_serve.cache.experts import ExpertPiece, Rows
from vlm_serve.cache.matching import Match
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.engine.core.hooks import Admission, Needs, StepRecords, StepRow
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.requests.plan import StepOutput
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup

Gaps = tuple[tuple[int, int], ...]

_FIRST_CAPACITY = 64


class ExpertLog:
    """Routed experts of one choice, token by token, from its own steps or from the cache.

    Rows `[tokens, layers, top_k]` of expert ids. There may be gaps: cached tokens without
    recorded rows. Rows written again (after a preemption) replace the old ones."""

    def __init__(self) -> None:
        self._rows: Rows | None = None
        self._known = np.zeros(0, dtype=bool)

    def put(self, start: int, rows: Rows) -> None:
        """Store the rows of tokens `[start, start + len(rows))`."""
        end = start + len(rows)
        if self._rows is None:
            self._rows = np.zeros((0, *rows.shape[1:]), dtype=rows.dtype)
        if end > len(self._known):
            self._resize(max(end, 2 * len(self._known), _FIRST_CAPACITY))
        self._rows[start:end] = rows
        self._known[start:end] = True

    def replay(self, pieces: Iterable[ExpertPiece]) -> None:
        """Take over the rows of cached tokens. Where the cache has none, rows known already are
        kept."""
        for piece in pieces:
            if piece.rows is not None:
                self.put(piece.start, piece.rows[: piece.end - piece.start])

    def num_unknown(self, end: int) -> int:
        """Return how many of the tokens `[0, end)` have no row."""
        return end - int(self._known[:end].sum())

    def take(self, start: int, end: int) -> tuple[Rows, Gaps]:
        """Return the rows of tokens `[start, end)`, zero where unknown, and the unknown positions
        as (first, last + 1) pairs."""
        assert self._rows is not None, "nothing was ever computed"
        known = np.zeros(end - start, dtype=bool)
        have = self._known[start:end]
        known[: len(have)] = have
        rows = np.zeros((end - start, *self._rows.shape[1:]), dtype=self._rows.dtype)
        rows[: len(have)] = self._rows[start:end]
        edges = np.flatnonzero(np.diff(np.concatenate(([True], known, [True]))))
        bounds = [int(edge) + start for edge in edges]
        return rows, tuple(zip(bounds[::2], bounds[1::2], strict=True))

    def copy(self) -> ExpertLog:
        """Return an independent copy, for a choice that forks."""
        twin = ExpertLog()
        twin._rows = None if self._rows is None else self._rows.copy()
        twin._known = self._known.copy()
        return twin

    def _resize(self, capacity: int) -> None:
        assert self._rows is not None
        rows = np.zeros((capacity, *self._rows.shape[1:]), dtype=self._rows.dtype)
        rows[: len(self._rows)] = self._rows
        known = np.zeros(capacity, dtype=bool)
        known[: len(self._known)] = self._known
        self._rows, self._known = rows, known


class ExpertReports:
    """Reports the routed experts of choices, and has the cache keep those of every token.

    Args:
        cache: has the rows of reused tokens.
        complete: True if no request may reuse tokens without recorded experts; otherwise only
            those with `complete_experts` may not.
    """

    def __init__(self, cache: PrefixCache, *, complete: bool) -> None:
        self._cache = cache
        self._complete = complete
        self._logs: dict[int, ExpertLog] = {}

    def on_added(self, group: SequenceGroup) -> None:
        self._logs.update({sequence.number: ExpertLog() for sequence in group.sequences})

    def on_rekeyed(self, group: SequenceGroup) -> None:
        """Collect the experts anew where those of all tokens are computed again."""
        for sequence in group.sequences:
            if sequence.held is None:
                self._logs[sequence.number] = ExpertLog()

    def on_matching(self, sequence: Sequence, needs: Needs) -> None:
        """Have a match end at the first gap, if there may be none."""
        needs.complete_experts = self._needs_all(sequence)

    def may_follow(self, sequence: Sequence, leader: Sequence, match: Match) -> bool:
        """Return True if the leader leaves the experts that a sequence has to have: it records
        them, and what it did not compute has them."""
        if not self._needs_all(sequence):
            return True
        return leader.number in self._logs and leader.num_cached <= match.boundary

    def on_matched(self, admission: Admission) -> None:
        """Take over what the cache has of the reused tokens."""
        sequence = admission.sequence
        log = self._logs[sequence.number]
        assert sequence.lease is not None
        log.replay(self._cache.cached_experts(sequence.lease))
        admission.experts_missing = log.num_unknown(admission.boundary)

    def on_output(self, rows: Tokens[StepRow], output: StepOutput, records: StepRecords) -> None:
        """Store the experts of a step, and give them to the cache."""
        for _, item in rows:
            computed = output.experts.get(item.sequence)
            if computed is None:
                continue
            records[item.sequence].experts = computed
            log = self._logs.get(item.sequence)
            if log is not None:
                kept = len(output.sampled[item.sequence]) if item.kind == "verify" else None
                log.put(item.start, computed[:kept])

    def on_forked(self, parent: Sequence, child: Sequence) -> None:
        """Begin a choice with the experts of the prompt."""
        self._logs[child.number] = self._logs[parent.number].copy()

    def report_last(self, sequence: Sequence, delta: Delta) -> Delta:
        """Add the experts to a choice's last delta."""
        start, end = sequence.request.params.routed_experts_prompt_start, sequence.num_tokens - 1
        rows, gaps = self._logs[sequence.number].take(start, end)
        return replace(delta, routed_experts=rows, routed_experts_gaps=gaps)

    def on_ended(self, sequence: Sequence) -> None:
        self._logs.pop(sequence.number, None)

    def _needs_all(self, sequence: Sequence) -> bool:
        return self._complete or sequence.request.complete_experts
