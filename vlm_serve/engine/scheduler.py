"""Decides what runs next: continuous batching of chunked prefill and decode under one token budget.

It owns queues, leases and lengths and touches no tensor. `plan` reserves, `commit` publishes what a
successful step has computed, `fail` takes everything of a failed step back.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.engine.admission import Admission
from vlm_serve.engine.media import MediaPlanner
from vlm_serve.engine.outputs import Delta
from vlm_serve.engine.plan import SampleTask, Slice, StepOutput, StepPlan
from vlm_serve.engine.sequence import Request, Sequence
from vlm_serve.engine.slicing import chunk_ends, slice_end
from vlm_serve.errors import EngineError, OverloadedError, VlmServeError

Event = tuple[Request, Delta]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step. Tokens unless stated otherwise; `state_interval` is in tokens too."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    chunk_size: int
    state_interval: int
    decode_state_interval: int


def _order(sequence: Sequence) -> tuple[int, int, int]:
    request = sequence.request
    return (request.priority, request.arrival, sequence.index)


class Scheduler:
    """FCFS with priority (a lower value runs first).

    Args:
        cache: blocks, state rows, snapshots and the trie.
        media: which spans need the vision tower, and where their embeddings are.
        config: limits.
    """

    def __init__(self, cache: PrefixCache, media: MediaPlanner, config: SchedulerConfig) -> None:
        self.cache = cache
        self.media = media
        self.config = config
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._by_number: dict[int, Sequence] = {}
        self._slices: list[Slice] = []
        self._suspects: list[Sequence] = []
        self._row_copies: list[tuple[int, int]] = []
        self._retired: list[Sequence] = []
        self._admission = Admission(cache, config.state_interval)

    # -- queues ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues the first choice; the others fork from it when its prompt has been computed."""
        for sequence in request.sequences:
            self._by_number[sequence.number] = sequence
        insort(self.waiting, request.sequences[0], key=_order)

    def abort(self, request: Request) -> list[Event]:
        """Frees everything of a request at once."""
        events = []
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = "abort"
                self._remove(sequence)
                events.append((request, self._ending(sequence)))
        return events

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def sequences(self) -> Iterable[Sequence]:
        return self._by_number.values()

    # -- plan --------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run."""
        self.media.begin_step(self.config.max_num_batched_tokens)
        budget = self.config.max_num_batched_tokens
        self._slices = []
        candidates = self.running if not self._suspects else self._suspects[:1]
        for sequence in sorted((s for s in candidates if not s.prefilling), key=_order):
            budget -= self._grant_decode(sequence)
        for sequence in sorted((s for s in candidates if s.prefilling), key=_order):
            budget -= self._grant_prefill(sequence, budget)
        self._admit(budget)
        if not self._slices:
            return None
        leases = [self._by_number[item.sequence].lease for item in self._slices]
        return StepPlan(
            slices=tuple(self._slices),
            encodes=self.media.take_encodes(),
            copies=tuple(copy for lease in leases if lease is not None for copy in lease.copies),
            row_copies=tuple(self._row_copies),
            dropped_slots=self.media.take_dropped(),
        )

    def _admit(self, budget: int) -> None:
        queue = self.waiting if not self._suspects else self._suspects[:1]
        for sequence in list(queue):
            if budget <= 0 or len(self.running) >= self.config.max_num_seqs:
                return
            if sequence.lease is not None:
                continue
            if not self._admit_one(sequence, budget):
                return
            self.waiting.remove(sequence)
            self.running.append(sequence)
            if sequence.prefilling:
                budget -= self._grant_prefill(sequence, budget)
            else:
                budget -= self._grant_decode(sequence)

    def _admit_one(self, sequence: Sequence, budget: int) -> bool:
        if self._admission.admit(sequence, budget, alone=not self.running):
            return True
        if sequence.suspect_until and self.running:
            # Whoever is under suspicion runs alone: the others wait for it anyway and make room.
            for other in list(self.running):
                self._preempt(other)
            return self._admission.admit(sequence, budget, alone=True)
        return False

    def _grant_decode(self, sequence: Sequence) -> int:
        """Plans one decode token; returns the tokens planned."""
        if sequence.lease is None or not self._make_room(sequence, sequence.num_computed + 1):
            return 0
        self._slices.append(self._decode_slice(sequence))
        return 1

    def _grant_prefill(self, sequence: Sequence, budget: int) -> int:
        """Plans the next slice of a prefill if budget and blocks allow it; returns its tokens."""
        if sequence.lease is None or budget <= 0:
            return 0
        start = sequence.num_computed
        end = slice_end(sequence.keys.cuts, start, sequence.prefill_target, budget)
        end = self.media.clip(sequence, start, end)
        if end <= start or not self._make_room(sequence, end):
            return 0
        self._slices.append(self._prefill_slice(sequence, start, end))
        return end - start

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grows the lease; preempts sequences that come later in order until it fits."""
        assert sequence.lease is not None
        while not self.cache.grow(sequence.lease, num_tokens):
            later = [s for s in self.running if _order(s) > _order(sequence)]
            if later:
                self._preempt(max(later, key=_order))
            elif len(self.running) > 1:
                self._preempt(sequence)
                return False
            else:
                raise AssertionError("a single sequence must fit: validated when it was submitted")
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        self.num_preemptions += 1
        self.media.release_all(sequence)
        sequence.suspended = self.cache.suspend(sequence.lease)
        sequence.lease = None
        # A decode token may have been planned before a prefill of higher priority needed its room.
        self._slices = [item for item in self._slices if item.sequence != sequence.number]
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
        insort(self.waiting, sequence, key=_order)

    # -- slices ------------------------------------------------------------------------------------

    def _decode_slice(self, sequence: Sequence) -> Slice:
        start = sequence.num_computed
        end = start + 1
        interval = self.config.decode_state_interval
        snapshots = self._reserve(sequence, (end,)) if interval and end % interval == 0 else ()
        return self._slice(sequence, start, end, False, (), snapshots, ())

    def _prefill_slice(self, sequence: Sequence, start: int, end: int) -> Slice:
        ends = chunk_ends(
            sequence.keys.cuts, start, end, self.config.block_size, self.config.chunk_size
        )
        wanted = sorted(p for p in sequence.snapshot_positions if start < p <= end)
        embeddings = self.media.acquire(sequence, start, end)
        return self._slice(
            sequence, start, end, True, ends, self._reserve(sequence, wanted), embeddings
        )

    def _slice(
        self,
        sequence: Sequence,
        start: int,
        end: int,
        prefill: bool,
        ends: tuple[int, ...],
        snapshots: tuple[tuple[int, int], ...],
        embeddings: tuple[tuple[int, int, int, int], ...],
    ) -> Slice:
        lease = sequence.lease
        assert lease is not None
        return Slice(
            sequence=sequence.number,
            prompt=sequence.prompt,
            token_ids=tuple(sequence.token_ids[start:end]),
            start=start,
            end=end,
            prefill=prefill,
            src_row=lease.src_row,
            dst_row=lease.row,
            block_table=tuple(lease.blocks),
            write_start=lease.shared_tokens,
            chunk_ends=ends,
            snapshots=snapshots,
            embeddings=embeddings,
            samples=self._sample_tasks(sequence) if end == sequence.num_tokens else (),
        )

    def _reserve(self, sequence: Sequence, positions: Iterable[int]) -> tuple[tuple[int, int], ...]:
        assert sequence.lease is not None
        reserved = []
        for position in positions:
            kind = sequence.snapshot_positions.get(position, "decode")
            row = self.cache.reserve_snapshot(sequence.lease, position, kind)
            if row is not None:
                reserved.append((position, row))
        return tuple(reserved)

    def _sample_tasks(self, sequence: Sequence) -> tuple[SampleTask, ...]:
        return tuple(
            SampleTask(
                sequence=each.number,
                params=each.request.params,
                history=each.generated,
                prompt_token_ids=each.prompt.token_ids,
                banned=each.banned,
                seed=each.seed,
            )
            for each in (sequence, *self._unborn(sequence))
        )

    def _unborn(self, sequence: Sequence) -> list[Sequence]:
        """The choices that fork from this sequence when it samples its first token."""
        if sequence.index != 0 or sequence.num_generated > 0:
            return []
        return [s for s in sequence.request.sequences[1:] if s.finish_reason is None]

    # -- after the step ----------------------------------------------------------------------------

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Event]:
        """Publishes what a successful step has computed and appends the sampled tokens."""
        self._forget_row_copies()
        self.media.commit_step()
        events: list[Event] = []
        for item in plan.slices:
            sequence = self._by_number[item.sequence]
            assert sequence.lease is not None
            sequence.num_computed = item.end
            self.cache.commit(
                sequence.lease, sequence.keys, item.end, exact_until=sequence.prefill_target
            )
            self.media.release_until(sequence, item.end)
            self._clear_suspect(sequence)
            if item.samples:
                events += self._accept(sequence, output)
            sequence.check_lengths()
        return events

    def _accept(self, sequence: Sequence, output: StepOutput) -> list[Event]:
        request = sequence.request
        unborn = self._unborn(sequence)
        if sequence.num_generated == 0:
            self.media.finish_report(request)
        events = [(request, sequence.accept(output.sampled[sequence.number]))]
        for child in unborn:
            events.append((request, child.accept(output.sampled[child.number])))
            if child.finish_reason is None:
                self._fork(sequence, child)
            else:
                self._remove(child)
        if sequence.finish_reason is not None:
            self._remove(sequence)
        return events

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives a choice a row and a partial block; without room it recomputes via the cache."""
        assert parent.lease is not None
        lease = None
        if len(self.running) < self.config.max_num_seqs:
            lease = self.cache.fork(parent.lease)
        if lease is None:
            child.prefill_target = child.num_tokens
            insort(self.waiting, child, key=_order)
            return
        child.lease = lease
        child.num_computed = parent.num_computed
        child.num_cached = parent.num_cached
        child.prefill_target = parent.prefill_target
        self._row_copies.append((parent.lease.row, lease.row))
        self.running.append(child)

    def fail(self, plan: StepPlan, error: Exception) -> list[Event]:
        """Takes a failed step back. State rows are updated in place, so every sequence of the step
        starts again from the cache, alone; one that fails alone is ended with the error."""
        self.media.abandon_step()
        ends = {item.sequence: item.end for item in plan.slices}
        if len(ends) == 1 and (culprit := self._by_number[next(iter(ends))]).suspect_until:
            self._forget_row_copies()
            return self._end_with_error(culprit, error)
        unborn_rows = {destination for _, destination in plan.row_copies}
        for sequence in list(self.running):
            assert sequence.lease is not None
            if sequence.number in ends:
                sequence.suspect_until = ends[sequence.number]
                self._suspects.append(sequence)
            elif sequence.lease.row not in unborn_rows:
                continue
            self._restart(sequence)
        self._forget_row_copies()
        return []

    def _restart(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        self.media.release_all(sequence)
        self.cache.abandon(sequence.lease)
        self.cache.close(sequence.lease)
        sequence.lease = None
        self._requeue(sequence)

    def _clear_suspect(self, sequence: Sequence) -> None:
        if sequence.suspect_until and sequence.num_computed >= sequence.suspect_until:
            sequence.suspect_until = 0
            self._suspects.remove(sequence)

    def _end_with_error(self, culprit: Sequence, error: Exception) -> list[Event]:
        request = culprit.request
        failure = (
            error
            if isinstance(error, VlmServeError)
            else EngineError(f"request {request.request_id} made the model's step fail")
        )
        return self.end_request(request, failure)

    def end_request(self, request: Request, failure: VlmServeError) -> list[Event]:
        """Ends every unfinished choice of a request with an error."""
        events = []
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = "error"
                self._remove(sequence)
                events.append((request, self._ending(sequence, failure)))
        return events

    def reject_head(self) -> list[Event]:
        """Ends the first waiting request: nothing runs and even alone it does not fit."""
        failure = OverloadedError("the request does not fit into the cache memory that is left")
        return self.end_request(self.waiting[0].request, failure)

    def _ending(self, sequence: Sequence, error: VlmServeError | None = None) -> Delta:
        request = sequence.request
        return Delta(
            index=sequence.index,
            finish_reason=sequence.finish_reason,
            usage=request.usage,
            cache_report=request.report,
            error=error,
        )

    def _remove(self, sequence: Sequence) -> None:
        """Forgets a finished sequence and gives back all it held."""
        for queue in (self.running, self.waiting, self._suspects):
            if sequence in queue:
                queue.remove(sequence)
        self._by_number.pop(sequence.number, None)
        self.media.release_all(sequence)
        if sequence.suspended is not None:
            self.cache.drop(sequence.suspended)
            sequence.suspended = None
        if sequence.lease is None:
            return
        self._row_copies = [copy for copy in self._row_copies if copy[1] != sequence.lease.row]
        if any(source == sequence.lease.row for source, _ in self._row_copies):
            # A forked choice reads this row at the start of the next step.
            self._retired.append(sequence)
        else:
            self.cache.close(sequence.lease)
            sequence.lease = None

    def _forget_row_copies(self) -> None:
        """The step that made the row copies is over: their sources may go."""
        self._row_copies = []
        for sequence in self._retired:
            assert sequence.lease is not None
            self.cache.close(sequence.lease)
            sequence.lease = None
        self._retired = []
