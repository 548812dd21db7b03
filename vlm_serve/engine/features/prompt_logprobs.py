"""Log-probabilities of prompts, collected for the requests that ask for them.

The rows of a request may come from its own steps or from the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import replace

import numpy as np

from vlm_serve.cache.logprobs import RowPiece, WantedRows, row_type
from vlm_serve.cache.records import LogprobRows
from vlm_serve.engine.core.hooks import Admission, Needs, StepRecords, StepRow
from vlm_serve.engine.requests.outputs import Delta, PromptLogprobs
from vlm_serve.engine.requests.plan import Slice, StepOutput
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup


class PromptLog:
    """Rows of one request, contiguous from the first requested token.

    Args:
        first: first requested token; the prompt's first token has no row.
        end: number of tokens of the prompt.
        top: number of most likely tokens per row.

    Attributes:
        first: first token whose row is wanted.
        next: first token whose row is missing.
        num_reused: number of rows from the cache.
        old: whether other weights have computed them.
    """

    def __init__(self, first: int, end: int, top: int) -> None:
        self.old = False
        self.first = self.next = max(1, first)
        self.num_reused = 0
        self._end = end
        self._rows = np.empty(max(0, end - self.first), row_type(top))
        self._top = top
        self._report: tuple[PromptLogprobs, ...] | None = None

    @property
    def wanted(self) -> WantedRows | None:
        """Missing rows, None if there are none."""
        return WantedRows(self.next, self._top) if self.next < self._end else None

    @property
    def known(self) -> RowPiece:
        return RowPiece(self.first, self._rows[: self.next - self.first])

    def to_report(self, start: int, end: int) -> tuple[int, int]:
        """Return the range (first, last + 1) of the tokens in `[start, end)` that precede a missing
        row."""
        assert self.next == self._end or start < self.next, "rows would be skipped"
        return max(start, self.next - 1), min(end, self._end - 1)

    def put(self, start: int, rows: LogprobRows) -> None:
        """Store rows of the tokens from `start` on. Rows that exist already are kept."""
        assert start <= self.next, "rows with a hole before them"
        new = rows[self.next - start :]
        place = self.next - self.first
        self._rows[place : place + len(new)] = new
        self.next += len(new)

    def replay(self, pieces: Iterable[RowPiece]) -> None:
        """Take over cached rows, in order."""
        before = self.next
        for piece in pieces:
            self.put(piece.start, piece.rows)
        self.num_reused += self.next - before

    def report(self, token_ids: Tokens[int]) -> tuple[PromptLogprobs, ...]:
        """Return all rows in the form for callers.

        Args:
            token_ids: tokens of the prompt.
        """
        assert self.wanted is None, "rows are missing"
        if self._report is None:
            rows = self._rows
            columns = zip(
                token_ids[self.first :],
                *(rows[name].tolist() for name in ("logprob", "rank", "ids", "logprobs")),
                strict=True,
            )
            self._report = tuple(
                PromptLogprobs({token: logprob, **dict(zip(ids, logprobs, strict=True))}, rank)
                for token, logprob, rank, ids, logprobs in columns
            )
        return self._report


class LogprobReports:
    """Reports the log-probabilities of prompts, and has the cache keep their rows.

    A step computes the rows of a limited number of tokens: each takes a row of logits.

    Args:
        most: maximum number of tokens that a step reports.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._logs: dict[SequenceGroup, PromptLog] = {}

    def on_added(self, group: SequenceGroup) -> None:
        params = group.request.params
        assert params.prompt_logprobs is not None
        self._logs[group] = PromptLog(
            params.prompt_logprobs_start, len(group.request.prompt), params.prompt_logprobs
        )

    def on_rekeyed(self, group: SequenceGroup) -> None:
        """Collect the rows of a prompt anew. Those of one whose answer has begun, or whose KV is
        kept, are reported, and the cache is to have none of them."""
        if group.holds or any(sequence.num_generated for sequence in group.sequences):
            self._logs[group].old = True
        else:
            self.on_added(group)

    def on_matching(self, sequence: Sequence, needs: Needs) -> None:
        """Have a match end before the first row that is missing."""
        log = self._logs[sequence.group]
        needs.logprobs, needs.first_row = log.wanted, log.first

    def on_matched(self, admission: Admission) -> None:
        """Take over what the match has."""
        log = self._logs[admission.sequence.group]
        if admission.uses_match:
            log.replay(admission.match.logprobs)
        admission.logprobs_reused = log.num_reused

    def plan_open(self, room: int) -> int:
        """Begin a step."""
        self._left = self._most
        return 0

    def may_prefill(self, sequence: Sequence, budget: int) -> int:
        """Limit a slice of a prompt to as many reports as the step has left."""
        log = self._logs[sequence.group]
        if log.wanted is None:
            return budget
        return min(budget, log.next - 1 - sequence.num_computed + self._left)

    def plan_prefill(self, sequence: Sequence, item: Slice) -> Slice:
        """Have a slice of a prompt report the tokens that precede missing rows."""
        log = self._logs[sequence.group]
        if log.wanted is None:
            return item
        start, end = log.to_report(item.start, item.end)
        self._left -= max(0, end - start)
        return replace(item, reported_start=start, reported_end=end)

    def on_output(self, rows: Tokens[StepRow], output: StepOutput, records: StepRecords) -> None:
        """Store the rows of a step, and give the cache all that are known."""
        for sequence, item in rows:
            log = self._logs.get(sequence.group)
            if log is None:
                continue
            reported = output.prompt_logprobs.get(item.sequence)
            if reported is not None:
                log.put(item.reported_start + 1, reported)
            records[item.sequence].logprobs = None if log.old else log.known

    def report_first(self, sequence: Sequence, delta: Delta) -> Delta:
        """Add the rows to a choice's first delta."""
        report = self._logs[sequence.group].report(sequence.prompt.token_ids)
        return replace(delta, prompt_logprobs=report)

    def on_ended(self, sequence: Sequence) -> None:
        """Forget the rows with the last choice."""
        if sequence.group.finished:
            self._logs.pop(sequence.group, None)
