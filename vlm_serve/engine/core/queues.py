"""Waiting and running sequences with their leases: the state shared by plan and commit.

A verify slice is a sampled token and the tokens that may follow it, each computed as a decode
token.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace

from vlm_serve.cache.prefix_cache import LeftState, PrefixCache
from vlm_serve.engine.core.hooks import Holding, Hooks
from vlm_serve.engine.core.media import MediaPlanner
from vlm_serve.engine.requests.plan import PartialFold, Slice
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup


def order(sequence: Sequence) -> tuple[int, int, int]:
    """Return the sort key for FCFS with priorities; lower values run first. Features may decide
    between tenants."""
    return (sequence.priority, sequence.request.arrival, sequence.index)


class SequenceQueues:
    """Queues of sequences and the transitions between them. Every transition frees what is no
    longer needed.

    Attributes:
        waiting: sequences without a lease, in scheduling order.
        running: sequences with a lease.
        suspects: sequences of a failed step that have yet to run alone without a failure.
        followers: numbers of the waiting sequences that wait for what a running one computes, and
            so add nothing of their own to the next steps.
        held: numbers of the sequences that features keep from running for now.
        kept: sequences whose answer has ended and that still have a lease, by number.
        planned: slices of the step being planned.
        partial_folds: copies of state rows for the step being planned.
        skip_mtp: see `StepPlan`.
        row_copies: (source, destination) state rows of forked choices, for the next step.
        folds: (state row, first update, count) of accepted updates, for the next step. They are
            applied before anything else reads the row.
        update_size: maximum number of updates of a slot; 0 for a model without state.
        ahead: numbers of the sequences whose next token is being computed already: their rows hold
            the state one token further than is known.

    Args:
        cache, media: resources that sequences hold.
        hooks: features that are told of the transitions.
        update_slots: number and size of the slots for the state updates of drafts and replayed
            tokens; None for a model without state.
    """

    def __init__(
        self,
        cache: PrefixCache,
        media: MediaPlanner,
        hooks: Hooks,
        *,
        update_slots: UpdateSlots | None = None,
    ) -> None:
        self.cache = cache
        self.media = media
        self.hooks = hooks
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.suspects: list[Sequence] = []
        self.followers: set[int] = set()
        self.held: set[int] = set()
        self.kept: dict[int, Sequence] = {}
        self.planned: list[Slice] = []
        self.partial_folds: tuple[PartialFold, ...] = ()
        self.skip_mtp = False
        self.ahead: frozenset[int] = frozenset()
        self.row_copies: list[tuple[int, int]] = []
        self.num_preemptions = 0
        self._by_number: dict[int, Sequence] = {}
        self._retired: list[tuple[Sequence, LeftState | None]] = []
        self._removed: list[int] = []
        self.folds: list[tuple[int, int, int]] = []
        self.update_size = update_slots.size if update_slots is not None else 0
        self._update_slots = UpdateSlotAllocator(update_slots) if update_slots is not None else None
        cache.events.row_freed.subscribe(self._forget_fold)

    def __getitem__(self, number: int) -> Sequence:
        return self._by_number[number]

    def find(self, number: int) -> Sequence | None:
        """Return a sequence that holds something or waits; None: it was removed."""
        return self._by_number.get(number)

    @property
    def holders(self) -> list[Sequence]:
        """Return the sequences that have a lease."""
        return [*self.running, *self.kept.values()]

    def take_removed(self) -> list[int]:
        """Return the numbers of the sequences that executors need no longer."""
        removed, self._removed = self._removed, []
        return removed

    def planned_of(self, sequence: Sequence) -> list[Slice]:
        """Return what the step being planned has of a sequence."""
        return [item for item in self.planned if item.sequence == sequence.number]

    def begin_plan(self) -> None:
        """Begin a step without anything in it."""
        self.planned, self.partial_folds, self.skip_mtp = [], (), False

    def reclaim(self, holding: Holding = "memory") -> bool:
        """Have features give up what they hold for later; return False if there was nothing."""
        reclaimed = False
        for give_up in self.hooks.reclaim:
            reclaimed |= give_up(holding)
        return reclaimed

    def add(self, group: SequenceGroup) -> None:
        """Queue the first choice. The others fork from it when its prompt has been computed."""
        for sequence in group.sequences:
            self._by_number[sequence.number] = sequence
        self.wait(group.sequences[0])

    def wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=order)
        for notice in self.hooks.on_waiting:
            notice(sequence)

    def is_held(self, sequence: Sequence) -> bool:
        """Return True if a waiting sequence is not to be admitted now: it waits for a lower tier or
        for a running prefill, a feature holds it, or it has just been admitted."""
        waits = sequence.fetching or sequence.number in self.followers
        return waits or sequence.number in self.held or sequence.lease is not None

    def is_copied(self, sequence: Sequence) -> bool:
        """Return True if the next step copies a running sequence's row, or fills it by a copy."""
        assert sequence.lease is not None
        return any(sequence.lease.row in copy for copy in self.row_copies)

    def start(self, sequence: Sequence) -> None:
        """Move a sequence with a lease from waiting to running."""
        self.waiting.remove(sequence)
        self.running.append(sequence)
        for notice in self.hooks.on_admitted:
            notice(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence back to waiting. Its state stays private to it until its memory
        is needed."""
        assert sequence.lease is not None
        self.num_preemptions += 1
        self._drop_forks_of(sequence)
        self._release_retired()
        self.media.release_all(sequence)
        self.fold(sequence)
        sequence.suspended = self.cache.suspend(sequence.lease)
        self._return_to_waiting(sequence)

    def retract(self, sequence: Sequence) -> None:
        """Move a running sequence back to waiting, and drop what was computed of one that waits."""
        if sequence in self.running:
            self.preempt(sequence)
        if sequence.suspended is not None:
            self.cache.drop(sequence.suspended)
            sequence.suspended = None
        self.media.release_all(sequence)

    def seclude(self, sequence: Sequence) -> None:
        """Leave what was computed of a sequence to it alone: nothing of it is published."""
        if sequence.held is not None:
            self.cache.seclude(sequence.held)
        self.media.release_all(sequence)

    def fold(self, sequence: Sequence) -> None:
        """Schedule pending updates to be folded into the sequence's row at the start of the next
        step."""
        assert sequence.lease is not None
        if sequence.pending:
            row, first = sequence.lease.src_row, self.first_update(sequence)
            self.folds.append((row, first, sequence.pending))
        # The slots are free already: a step applies folds before it writes updates.
        self._release_update_slots(sequence)

    def first_update(self, sequence: Sequence) -> int:
        """Return the index of the first pending update of a sequence."""
        assert sequence.pending and self._update_slots is not None
        return self._update_slots.first_update(sequence)

    def forget_updates(self, sequence: Sequence) -> None:
        """Forget a sequence's pending updates: nobody reads its row any more."""
        self._release_update_slots(sequence)

    def update_capacity(self, sequence: Sequence) -> int | None:
        """Return the number of tokens of a running sequence whose updates can be stored. None means
        any number: the model has no state."""
        return None if self._update_slots is None else self._update_slots.capacity(sequence)

    def take_updates(self, sequence: Sequence, tokens: int) -> int:
        """Allocate space for the updates of a running sequence's next tokens. Return the index of
        the first update; -1 for a model without state."""
        return -1 if self._update_slots is None else self._update_slots.take(sequence, tokens)

    def drop_suspended(self, rows: set[int]) -> None:
        """Drop suspended state in rows with unknown content. The sequences restart from the
        cache."""
        for sequence in self.waiting:
            suspended = sequence.suspended
            lease = suspended.lease if suspended is not None else None
            if suspended is not None and lease is not None and lease.row in rows:
                self.cache.drop(suspended)
                sequence.suspended = None

    def restart(self, sequence: Sequence) -> None:
        """Move a running sequence back to waiting; it restarts from shared cache entries."""
        assert sequence.lease is not None
        self.media.release_all(sequence)
        self.cache.close(sequence.lease)
        self._return_to_waiting(sequence)

    def keep(self, sequence: Sequence) -> None:
        """Take a finished sequence out of the queues. It keeps its lease and pending updates until
        it is removed."""
        self._detach(sequence)
        self.kept[sequence.number] = sequence

    def _detach(self, sequence: Sequence) -> None:
        for notice in self.hooks.on_ended:
            notice(sequence)
        for queue in (self.running, self.waiting, self.suspects):
            if sequence in queue:
                queue.remove(sequence)
        self.media.release_all(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence and free its resources. If its row holds the state at a cut
        point, it becomes the snapshot there."""
        left = self._left_state(sequence)
        number = sequence.number
        if self.kept.pop(number, None) is None:
            self._detach(sequence)
        else:
            self.planned = [item for item in self.planned if item.sequence != number]
        if self._by_number.pop(number, None) is not None:
            self._removed.append(number)
        self._release_update_slots(sequence)
        if sequence.request.cold:
            self.media.discard(sequence)
        if sequence.suspended is not None:
            self.cache.drop(sequence.suspended, left)
            sequence.suspended = None
        if sequence.lease is None:
            return
        row = sequence.lease.row
        self.row_copies = [copy for copy in self.row_copies if copy[1] != row]
        if any(copy[0] == row for copy in self.row_copies):
            # A forked choice reads this row at the start of the next step.
            self._retired.append((sequence, left))
            return
        self._close(sequence, left)
        self._release_retired()

    def fork(self, parent: Sequence, child: Sequence, max_num_seqs: int) -> None:
        """Give a choice its own row and partial block. If that fails, it waits and recomputes via
        the cache."""
        assert parent.lease is not None
        may_run = len(self.running) < max_num_seqs
        lease = self.cache.fork(parent.lease) if may_run else None
        if lease is None:
            self.wait(child)
            return
        child.lease = lease
        child.adapter_slot = parent.adapter_slot
        child.num_computed = parent.num_computed
        child.num_cached = parent.num_cached
        child.prefill_target = parent.prefill_target
        if lease.row >= 0:
            self.row_copies.append((parent.lease.row, lease.row))
        self.running.append(child)

    def forget_row_copies(self) -> None:
        """Clear row copies and folds: their step is over. Their source rows may be freed."""
        self.row_copies = []
        self.folds = []
        self._release_retired()

    def _release_retired(self) -> None:
        """Free finished sequences whose row is no longer the source of a copy."""
        sources = {source for source, _ in self.row_copies}
        retired, self._retired = self._retired, []
        for sequence, left in retired:
            assert sequence.lease is not None
            if sequence.lease.row in sources:
                self._retired.append((sequence, left))
            else:
                self._close(sequence, left)

    def _drop_forks_of(self, parent: Sequence) -> None:
        """Restart from the cache the choices that would have copied the parent's row in this
        step."""
        assert parent.lease is not None
        row = parent.lease.row
        children = {copy[1] for copy in self.row_copies if copy[0] == row}
        self.row_copies = [copy for copy in self.row_copies if row not in copy]
        for child in [s for s in self.running if s.lease and s.lease.row in children]:
            self.restart(child)

    def _return_to_waiting(self, sequence: Sequence) -> None:
        for notice in self.hooks.on_stopping:
            notice(sequence)
        if sequence.lease is not None and sequence.lease.hit is not None:
            # No step has succeeded since: the next admission counts as the first.
            sequence.group.report = None
        sequence.lease = None
        self._release_update_slots(sequence)
        self.running.remove(sequence)
        # A prefill of higher priority may take blocks after a decode token was planned.
        self.planned = [item for item in self.planned if item.sequence != sequence.number]
        self.wait(sequence)

    def verify_capacity(self, item: Slice, state_interval: int) -> int:
        """Return the number of tokens that fit behind a decode token. The limits are the answer's
        length, free blocks and updates. Another limit is the next position that needs a state
        snapshot, since only a decode token leaves one.

        Args:
            state_interval: tokens between state snapshots while decoding; 0 means none.
        """
        sequence, cache = self[item.sequence], self.cache
        lease, updates = sequence.lease, self.update_capacity(sequence)
        assert lease is not None
        blocks = len(lease.blocks) + cache.free_block_count
        limits = [sequence.answer.tokens_left(sequence.num_generated) - 1]
        limits.append(blocks * cache.config.block_size - item.end)
        if updates is not None:
            limits.append(updates - 1)
        if state_interval:
            limits.append(-item.end % state_interval - 1)
        return min(limits)

    def verify_slice(self, item: Slice, drafts: Tokens[int]) -> Slice:
        """Return a planned decode token extended by as many drafts as are allowed. Return it
        unchanged if no draft is allowed or no blocks are free."""
        sequence = self[item.sequence]
        lease, cache = sequence.lease, self.cache
        assert lease is not None and item.src_row == item.dst_row
        # Other drafts may have taken updates or blocks since the capacity was computed.
        updates = self.update_capacity(sequence)
        drafts = drafts if updates is None else drafts[: max(0, updates - 1)]
        tasks = sequence.draft_tasks(item.samples[0], drafts)
        tokens = tuple([task.draft for task in tasks if task.draft is not None])
        end = item.end + len(tokens)
        fits = -(-end // cache.config.block_size) <= len(lease.blocks) + cache.free_block_count
        if not tokens or not fits:
            return item
        grown = cache.grow(lease, end)
        assert grown, "there are free blocks"
        return replace(
            item,
            kind="verify",
            token_ids=item.token_ids + tokens,
            end=end,
            blocks=tuple(lease.blocks[item.first_block :]),
            samples=tasks,
            updates=self.take_updates(sequence, 1 + len(tokens)),
            pending=sequence.pending,
        )

    def _release_update_slots(self, sequence: Sequence) -> None:
        sequence.pending = 0
        if self._update_slots is not None:
            self._update_slots.release(sequence)

    def _forget_fold(self, row: int) -> None:
        self.folds = [fold for fold in self.folds if fold[0] != row]

    def _left_state(self, sequence: Sequence) -> LeftState | None:
        """Return what a sequence leaves if its row holds the state after its computed tokens. None
        while updates have to be folded into it, or while it has to be copied first."""
        lease = sequence.held
        if lease is None or sequence.pending or sequence.number in self.ahead:
            return None
        unfinished = {row for row, _, _ in self.folds} | {copy[1] for copy in self.row_copies}
        if lease.row in unfinished:
            return None
        return LeftState(sequence.keys, sequence.prefill_target)

    def _close(self, sequence: Sequence, left: LeftState | None) -> None:
        assert sequence.lease is not None
        self.cache.close(sequence.lease, left)
        sequence.lease = None


MAX_REPLAYS = 4
"""Maximum number of requests that replay at the same time."""
REPLAYED_TOKENS = 16
"""Tokens per slice of a replay if drafts are disabled. On a CPU this many rows cost little more
than one."""


@dataclass(frozen=True, slots=True)
class UpdateSlots:
    """Number and size of update slots: `count` slots of `size` updates each."""

    count: int
    size: int

    @classmethod
    def of(cls, max_num_seqs: int, speculative_tokens: int) -> UpdateSlots:
        """Choose number and size of the slots. With drafts, every sequence has a slot for its
        sampled token and its drafts. Without drafts, a few slots serve replays."""
        if speculative_tokens:
            return cls(max_num_seqs, speculative_tokens + 1)
        return cls(min(max_num_seqs, MAX_REPLAYS), REPLAYED_TOKENS)

    @property
    def total(self) -> int:
        return self.count * self.size


class UpdateSlotAllocator:
    """Allocates update slots to sequences.

    A sequence may hold two adjacent slots: if few sequences run, the other slots are free. Slots at
    even indices are allocated first, so that their neighbours stay free as long as possible.

    Args:
        slots: number and size of the slots.
    """

    def __init__(self, slots: UpdateSlots) -> None:
        self._size = slots.size
        self._free: list[int] = []
        self._held: dict[Sequence, list[int]] = {}
        for slot in range(slots.count):
            self._return_slot(slot)

    def first_update(self, sequence: Sequence) -> int:
        """Return the index of the first update of a sequence that holds a slot."""
        return self._held[sequence][0] * self._size

    def capacity(self, sequence: Sequence) -> int:
        """Return the number of tokens of a sequence whose updates can be stored; 0 if no slot is
        free."""
        slots = self._held.get(sequence)
        if slots is None and not self._free:
            return 0
        first = self._free[-1] if slots is None else slots[0]
        return self._size * (2 if self._has_neighbour(first, slots or []) else 1)

    def take(self, sequence: Sequence, tokens: int) -> int:
        """Allocate space for the updates of `tokens` tokens, at most `capacity`. Return the index
        of the first update. Pending updates keep their place."""
        if sequence not in self._held:
            self._held[sequence] = [self._free.pop()]
        slots = self._held[sequence]
        if tokens > self._size:
            assert self._has_neighbour(slots[0], slots)
            if len(slots) == 1:
                slots.append(slots[0] + 1)
                self._free.remove(slots[1])
        elif sequence.pending <= self._size and len(slots) > 1:
            self._return_slot(slots.pop())
        return slots[0] * self._size

    def release(self, sequence: Sequence) -> None:
        """Free the slots of a sequence; none of its updates is pending."""
        for slot in self._held.pop(sequence, ()):
            self._return_slot(slot)

    def _has_neighbour(self, slot: int, slots: list[int]) -> bool:
        """Return True if a slot at an even index can be extended by the next one: it is free or
        already the sequence's own."""
        return slot % 2 == 0 and (len(slots) > 1 or slot + 1 in self._free)

    def _return_slot(self, slot: int) -> None:
        insort(self._free, slot, key=lambda index: (index % 2 == 0, -index))
