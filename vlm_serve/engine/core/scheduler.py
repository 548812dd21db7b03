"""Scheduler of an engine: decides what runs next and settles what has run. It touches no tensor.

`plan` reserves resources, `commit` publishes the results of a successful step, `fail` rolls a
failed step back.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.engine.core.admission import Admitter
from vlm_serve.engine.core.executor import RowsAfter, StepError
from vlm_serve.engine.core.extending import Extender
from vlm_serve.engine.core.hooks import CommittedRow, Hooks, StepRecords, StepRow, TokenRecords
from vlm_serve.engine.core.media import MediaPlanner
from vlm_serve.engine.core.planning import Planner, SchedulerConfig
from vlm_serve.engine.core.queues import SequenceQueues, UpdateSlots
from vlm_serve.engine.requests.outputs import Delta, FinishReason
from vlm_serve.engine.requests.plan import DecodeRows, SampledToken, Slice, StepOutput, StepPlan
from vlm_serve.engine.requests.reports import complete_report
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup
from vlm_serve.errors import (
    EngineError,
    InvalidRequestError,
    NotANumberError,
    OverloadedError,
    VlmServeError,
)

Event = tuple[SequenceGroup, Delta]

_NO_RECORDS = TokenRecords()


class Scheduler:
    """Scheduler of one engine; used by the engine's thread only. It knows no feature: the table in
    `features/table.py` hangs them on its hooks.

    Args:
        cache: blocks, state rows, snapshots and the trie.
        media: tracks which spans need the vision tower and where embeddings are stored.
        config: limits.

    Attributes:
        running, waiting: read-only.
        hooks: what features do at the moments of a step.
        queues: the sequences and what they hold.
        admitter: matches sequences and gives them leases.
        extender: plans steps that only extend the one before.
        pace: limits the prompt tokens of steps.
        num_unsound: requests that ended because their logits were no numbers.
    """

    def __init__(self, cache: PrefixCache, media: MediaPlanner, config: SchedulerConfig) -> None:
        self._cache = cache
        self._media = media
        self._config = config
        self.hooks = Hooks()
        update_slots = UpdateSlots.of(config.max_num_seqs, config.speculative_tokens)
        self.queues = SequenceQueues(
            cache,
            media,
            self.hooks,
            update_slots=update_slots if cache.config.has_state else None,
        )
        self.admitter = Admitter(cache, self.hooks, config.state_interval)
        self._records = StepRecords(TokenRecords)
        self._planner = Planner(self.queues, self.admitter, config)
        self.extender = Extender(self.queues, config.max_num_seqs, config.decode_state_interval)
        self.pace = self._planner.pace
        self._committed: StepPlan | None = None
        self.num_unsound = 0
        self.running, self.waiting = self.queues.running, self.queues.waiting

    @property
    def num_preemptions(self) -> int:
        return self.queues.num_preemptions

    @property
    def has_idle_callers(self) -> bool:
        """Return True if a caller's request waits for anything but a running prefill or its own
        client."""
        others = self.queues.followers | self.queues.held
        return any(
            not sequence.request.cold and sequence.number not in others for sequence in self.waiting
        )

    @property
    def has_work(self) -> bool:
        if not all(may() for may in self.hooks.may_step):
            return False
        return bool(self.waiting or self.running) or any(busy() for busy in self.hooks.has_work)

    def add(self, group: SequenceGroup) -> None:
        """Queue a request."""
        for notice in self.hooks.on_added:
            notice(group)
        self.queues.add(group)

    def take_removed(self) -> list[int]:
        """Return the numbers of the sequences that executors need no longer."""
        return self.queues.take_removed()

    def plan(self) -> StepPlan | None:
        """Plan the next step; return None if nothing can run. Call `take_failures` afterwards."""
        last, self._committed = self._committed, None
        if last is not None and self._config.extends_steps:
            extended = self.extender.extend(last, ahead=False)
            if extended is not None:
                return extended
        return self._planner.plan()

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step behind one that is not committed; return None if that has to wait for its
        results."""
        ahead = self.extender.extend(plan, ahead=True)
        rows = None if ahead is None else ahead.rows
        self.queues.ahead = frozenset(() if rows is None else rows.sequences)
        return ahead

    def learn(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        """Record the duration of a successful step, in seconds."""
        if not plan.num_tokens:
            return
        self.pace.learn(plan, seconds, awaited=output.awaited)
        for notice in self.hooks.on_learned:
            notice(plan, output, seconds)

    def take_failures(self) -> list[Event]:
        """End the requests that could not be planned."""
        failures, self._planner.failures = self._planner.failures, []
        return [event for failure in failures for event in self._end_with_error(*failure)]

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Event]:
        """Publish the results of a successful step and append the sampled tokens."""
        self._committed = plan
        if plan.rows is not None:
            return self._commit_rows(plan.rows, output)
        self.queues.forget_row_copies()
        self._media.commit_step()
        rows = [StepRow(self.queues[item.sequence], item) for item in plan.slices]
        self._records = StepRecords(TokenRecords)
        for notice in self.hooks.on_output[:]:
            notice(rows, output, self._records)
        self._commit_last_tokens(rows)
        events, committed = self._end_unsound(rows, output), list[CommittedRow]()
        for sequence, item in rows:
            if sequence.answer.finish_reason is not None:
                continue
            if item.kind == "verify":
                accepted = self._commit_drafts(sequence, item, output, events)
            else:
                accepted = self._commit_slice(sequence, item, output, events)
            committed.append(CommittedRow(sequence, item, accepted))
        for tell in self.hooks.on_committed[:]:
            tell(committed, output)
        return events + self._end_grammars_over_limits()

    def _commit_rows(self, rows: DecodeRows, output: StepOutput) -> list[Event]:
        """Commit a step that has only extended another one. What it computed of sequences that have
        ended meanwhile is void, but for the row of a last token."""
        queues, size = self.queues, self._config.block_size
        found = [queues.find(number) for number in rows.sequences]
        ends = (rows.starts + 1).tolist()
        if queues.kept:
            for sequence, end in zip(found, ends, strict=True):
                if sequence is not None and sequence.number in queues.kept:
                    for passed in self.hooks.on_passed:
                        passed(sequence, end)
        for notice in self.hooks.on_computed:
            notice()
        events = self._end_unsound_rows(found, output)
        plain = output.tokens
        for place, sequence in enumerate(found):
            if sequence is None or sequence.answer.finish_reason is not None:
                continue
            lease, end = sequence.lease, ends[place]
            assert lease is not None
            sequence.num_computed, sequence.settled_blocks = end, (end - 1) // size
            if not self._cache.advance(lease, sequence.keys, end):
                self._publish(sequence, end, _NO_RECORDS)
            if plain is not None:
                delta = sequence.accept_id(plain[place])
            else:
                delta = sequence.accept(output.sampled[sequence.number][0])
            if delta.finish_reason is not None:
                for report in self.hooks.report_last:
                    delta = report(sequence, delta)
                self._finish(sequence)
            events.append((sequence.group, delta))
        return events

    def _end_unsound_rows(self, found: Rows[Sequence | None], output: StepOutput) -> list[Event]:
        """Do as `_end_unsound` does, for a step of rows."""
        events: list[Event] = []
        for sequence in found if output.unsound else ():
            if sequence is not None and sequence.answer.finish_reason is None:
                events += self._end_if_unsound(sequence, {sequence.number}, output)
        return events

    def _commit_last_tokens(self, rows: list[StepRow]) -> None:
        """Commit the last tokens of answers that had ended before, and have them published before
        further answers end."""
        for sequence, item in rows:
            if item.sequence in self.queues.kept:
                self._commit_tokens(sequence, item, item.end)
        for notice in self.hooks.on_computed:
            notice()

    def _commit_slice(
        self, sequence: Sequence, item: Slice, output: StepOutput, events: list[Event]
    ) -> int:
        """Commit a slice of prompt or one token; return how many of its tokens were sampled."""
        self._commit_tokens(sequence, item, item.end)
        self._media.release_until(sequence, item.end)
        self._clear_suspect(sequence)
        if item.samples:
            events += self._accept(sequence, output)
        if item.drafts and sequence.lease is not None:
            self._cache.shrink(sequence.lease, sequence.num_computed)
        sequence.check_lengths()
        return int(bool(item.samples))

    def _commit_tokens(self, sequence: Sequence, item: Slice, end: int) -> None:
        """Mark the tokens of a slice before position `end` as computed and publish them."""
        assert sequence.lease is not None
        sequence.num_computed = end
        sequence.settled_blocks = item.start // self._config.block_size
        self._publish(sequence, end, self._records.get(item.sequence, _NO_RECORDS))

    def _publish(self, sequence: Sequence, end: int, records: TokenRecords) -> None:
        """Publish a sequence's tokens before position `end`."""
        assert sequence.lease is not None
        self._cache.commit(
            sequence.lease,
            sequence.keys,
            end,
            exact_until=sequence.prefill_target,
            answer_start=len(sequence.prompt),
            experts=records.experts,
            logprobs=records.logprobs,
        )

    def _commit_drafts(
        self, sequence: Sequence, item: Slice, output: StepOutput, events: list[Event]
    ) -> int:
        """Accept sampled tokens up to the first rejected draft or the end of the answer; return
        their number. Blocks and updates behind that token are discarded."""
        assert sequence.lease is not None
        forced = item.samples[0].forced is not None
        sampled, drafted = output.sampled[sequence.number], len(item.samples) - 1
        group, taken = sequence.group, 0
        group.drafted_tokens += 0 if forced else drafted
        for taken, token in enumerate(sampled, 1):
            group.accepted_tokens += not forced and taken < len(sampled)
            events.append(self._append(sequence, token))
            if sequence.answer.finish_reason is not None:
                break
        self._commit_tokens(sequence, item, item.start + taken)
        self._cache.shrink(sequence.lease, sequence.num_computed)
        sequence.pending = taken if item.updates >= 0 else 0
        sequence.check_lengths()
        if sequence.answer.finish_reason is not None:
            self._finish(sequence)
        return taken

    def _end_unsound(self, rows: list[StepRow], output: StepOutput) -> list[Event]:
        """End the requests with results that are no numbers. Nothing that the step has computed of
        them is committed, so neither KV nor state of it is found by others."""
        events: list[Event] = []
        for sequence, item in rows if output.unsound else ():
            told = {item.sequence, *(task.sequence for task in item.samples)}
            if sequence.answer.finish_reason is None:
                events += self._end_if_unsound(sequence, told, output)
        return events

    def _end_if_unsound(
        self, sequence: Sequence, told: set[int], output: StepOutput
    ) -> list[Event]:
        """End a sequence's request if the results of one of the sequences `told` are no numbers."""
        if output.unsound.isdisjoint(told):
            return []
        self.num_unsound += 1
        for choice in sequence.group.sequences:
            if choice in self.running:
                self.queues.restart(choice)
        return self.end(sequence.group, NotANumberError.of("the model"))

    def _finish(self, sequence: Sequence) -> None:
        """Remove a sequence whose answer has ended, unless a feature keeps what it holds."""
        if all(may(sequence) for may in self.hooks.may_leave):
            self.queues.remove(sequence)

    def _end_grammars_over_limits(self) -> list[Event]:
        """End requests whose grammar is over a limit: they would delay all others."""
        events: list[Event] = []
        for sequence in list(self.running):
            grammar = sequence.answer.grammar
            if grammar is not None and grammar.over_limit and not sequence.group.finished:
                failure = InvalidRequestError(
                    grammar.over_limit, param="structured_outputs", code="grammar_limit"
                )
                events += self.end(sequence.group, failure)
        return events

    def fail(self, plan: StepPlan, failure: StepError) -> list[Event]:
        """Roll a failed step back.

        State rows are updated in place, so every sequence of the step restarts from the cache,
        alone. A sequence that fails alone is ended with the error. Drafts do not write the row
        itself: if the row's content is known, the sequence continues from it.
        """
        self._committed, self.queues.ahead = None, frozenset()
        if plan.rows is not None:
            plan = self._of_slices(plan.rows)
        self._media.abandon_step()
        ending = self.queues.kept.keys() & {item.sequence for item in plan.slices}
        for notice in self.hooks.on_failed:
            notice(plan)
        folded_rows = {row for row, _, _ in plan.folds}
        self.queues.drop_suspended(folded_rows)
        # Drafts may have been rejected, so only the sampled token is certain.
        items = {item.sequence: item for item in plan.slices if item.sequence not in ending}
        ends = {
            number: item.start + 1 if item.kind == "verify" else item.end
            for number, item in items.items()
        }
        first = self.queues[next(iter(ends))] if len(ends) == 1 else None
        invalid_rows = folded_rows | {destination for _, destination in plan.row_copies}
        if first is not None and first.suspect_until:
            # What is in these rows is unknown: nobody may leave them as snapshots.
            for sequence in list(self.running):
                assert sequence.lease is not None
                if sequence is first or sequence.lease.row in invalid_rows:
                    self.queues.restart(sequence)
            self.queues.forget_row_copies()
            return self._end_with_error(first, failure.cause)
        for sequence in list(self.running):
            assert sequence.lease is not None
            if sequence.number in ends:
                sequence.suspect_until = max(ends[sequence.number], sequence.suspect_until)
                if sequence not in self.queues.suspects:
                    self.queues.suspects.append(sequence)
                if self._keeps_row(items[sequence.number], failure.rows):
                    continue
            elif sequence.lease.row not in invalid_rows:
                continue
            self.queues.restart(sequence)
        self.queues.forget_row_copies()
        return []

    def _of_slices(self, rows: DecodeRows) -> StepPlan:
        """Return a step of rows as one of slices, without those that are void."""
        slices = rows.slices(self._config.block_size)
        return StepPlan(tuple(each for each in slices if self.queues.find(each.sequence)))

    def _keeps_row(self, item: Slice, rows: RowsAfter) -> bool:
        """Return True if a sequence of a failed step keeps its state row. Only verify slices leave
        a valid row."""
        if item.kind != "verify" or rows == "unknown" or (item.pending and rows == "mixed"):
            return False
        sequence = self.queues[item.sequence]
        assert sequence.lease is not None
        if rows != "whole":
            sequence.pending = 0
        self._cache.shrink(sequence.lease, sequence.num_computed)
        return True

    def end(self, group: SequenceGroup, failure: VlmServeError | None = None) -> list[Event]:
        """End all unfinished choices of a request and free their resources at once. Without
        `failure` the request is aborted."""
        reason: FinishReason = "abort" if failure is None else "error"
        events = []
        for sequence in group.sequences:
            if sequence.answer.finish_reason is not None:
                continue
            sequence.answer.finish_reason = reason
            if failure is None:
                self._finish(sequence)
            else:
                self.queues.remove(sequence)
            ending = Delta(
                index=sequence.index,
                finish_reason=reason,
                usage=group.usage,
                cache_report=group.report,
                error=failure,
            )
            events.append((group, ending))
        return events

    def reject_head(self) -> list[Event]:
        """End the first waiting request with an error: it does not fit although nothing else is
        running."""
        failure = OverloadedError("the request does not fit into the cache memory that is left")
        return self.end((self._planner.refused or self.waiting[0]).group, failure)

    def _accept(self, sequence: Sequence, output: StepOutput) -> list[Event]:
        group, events = sequence.group, list[Event]()
        if sequence.num_generated == 0:
            group.report = complete_report(self._cache, sequence)
        for choice in (sequence, *sequence.pending_forks):
            if choice is not sequence:
                for notice in self.hooks.on_forked:
                    notice(sequence, choice)
            for sampled in output.sampled[choice.number]:
                if choice.answer.finish_reason is None:
                    events.append(self._append(choice, sampled))
            if choice is not sequence and choice.answer.finish_reason is None:
                self.queues.fork(sequence, choice, self._config.max_num_seqs)
            elif choice is not sequence:
                self.queues.remove(choice)
        if sequence.answer.finish_reason is not None:
            self._finish(sequence)
        return events

    def _append(self, sequence: Sequence, sampled: SampledToken) -> Event:
        """Append a sampled token to an answer, and return its increment."""
        delta = sequence.accept(sampled)
        if sequence.num_generated == 1:
            for report in self.hooks.report_first:
                delta = report(sequence, delta)
        if delta.finish_reason is not None:
            for report in self.hooks.report_last:
                delta = report(sequence, delta)
        return sequence.group, delta

    def _clear_suspect(self, sequence: Sequence) -> None:
        if sequence.suspect_until and sequence.num_computed >= sequence.suspect_until:
            sequence.suspect_until = 0
            self.queues.suspects.remove(sequence)

    def _end_with_error(self, culprit: Sequence, error: Exception) -> list[Event]:
        if isinstance(error, VlmServeError):
            return self.end(culprit.group, error)
        message = f"request {culprit.request.request_id} made the model's step fail"
        return self.end(culprit.group, EngineError(message))
