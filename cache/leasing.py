"""The life of a request in the cache: what it acquires, publishes and returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlm_serve.cache.eviction import Evictor
from vlm_serve.cache.experts import record, seed
from vlm_serve.cache.logprobs import RowPiece, keep
from vlm_serve.cache.places import Places
from vlm_serve.cache.pools import RowState
from vlm_serve.cache.publishing import LeftState, Publisher, give_row
from vlm_serve.cache.records import Lease, LeaseState, Rows, Snapshot
from vlm_serve.cache.suspension import Suspended, Suspensions
from vlm_serve.cache.timed_pins import TimedPins

if TYPE_CHECKING:
    from vlm_serve.cache.ledger import Ledger
    from vlm_serve.cache.matching import Match
    from vlm_serve.preprocess.identity.keys import PromptKeys

ANSWER_END, ANSWER_PART = "answer_end", "answer_part"
"""Kinds of snapshots: behind the token that ended an answer, and inside of an answer."""
_SUPERSEDED = frozenset({"prompt_end", ANSWER_END, ANSWER_PART})
_MAX_SUPERSEDED = 32


class AnswerEnds:
    """Keeps states at the ends of answers: rows of a lease that become snapshots once it has ended
    in order. It decides nothing: the engine says what is worth a row.

    The live row behind an answer's last token is a snapshot already and changes hands without a
    copy. For an answer that ends elsewhere, a second row holds the state of its last block
    boundary.
    """

    def __init__(self, ledger: Ledger, evictor: Evictor) -> None:
        self._ledger = ledger
        self._evictor = evictor

    def trail(self, lease: Lease, position: int, expected: float) -> int | None:
        """Return a row for the state at the next block boundary of an answer: the one of the last
        boundary again, or a free or cheap one. None if there is none.

        Args:
            position: a multiple of the block size, in the answer. The row holds its state after the
                next step.
            expected: number of expected uses.
        """
        assert lease.state is LeaseState.OPEN and position > lease.boundary
        assert lease.trailing is None or position > lease.trailing.position
        if lease.trailing is None:
            if not self._evictor.make_row(worth=expected * (position - lease.boundary)):
                return None
            row = self._ledger.rows.take(RowState.RESERVED)
            lease.trailing = Snapshot(row, position, ANSWER_PART)
        lease.trailing.position = position
        lease.trailing.expected = expected
        return lease.trailing.row

    def keep_row(self, lease: Lease, position: int, expected: float) -> None:
        """Turn the lease's live row into a reserved snapshot at a cut point; it counts as live no
        more. At the lease's own length the row holds that state already, or will once the pending
        updates are folded. Further on it does after the step that computes the tokens up to there.
        """
        assert lease.state is LeaseState.OPEN and lease.committed and not lease.private
        assert lease.row >= 0 and position >= lease.length
        snapshot = Snapshot(lease.row, position, ANSWER_END)
        snapshot.expected = expected
        self._ledger.rows.change(lease.row, RowState.LIVE, RowState.RESERVED)
        lease.row = -1
        if position > lease.length:
            lease.reserved[position] = snapshot
            return
        self.drop_trailing(lease)
        snapshot.kind = ANSWER_PART
        lease.trailing = snapshot

    def release_row(self, lease: Lease) -> None:
        """Free the row that `keep_row` has reserved beyond the computed tokens, or else the live
        one."""
        ledger = self._ledger
        for position in [p for p in lease.reserved if p > lease.length]:
            ledger.rows.change(lease.reserved.pop(position).row, RowState.RESERVED, RowState.FREE)
        if lease.row >= 0:
            ledger.rows.change(lease.row, RowState.LIVE, RowState.FREE)
            lease.row = -1

    def drop_trailing(self, lease: Lease) -> None:
        """Free the row of the last block boundary, if there is one."""
        if lease.trailing is not None:
            self._ledger.rows.change(lease.trailing.row, RowState.RESERVED, RowState.FREE)
            lease.trailing = None

    def publish_trailing(self, lease: Lease, keys: PromptKeys, exact_until: int) -> None:
        """Publish the state of the last block boundary, whose tokens are published already."""
        snapshot, lease.trailing = lease.trailing, None
        assert snapshot is not None and snapshot.position <= lease.length
        Publisher(self._ledger, lease, keys, lease.length, exact_until).publish_snapshot(snapshot)
        self.supersede(snapshot)

    def supersede(self, snapshot: Snapshot) -> None:
        """Expect no further use of the states behind which an answer has gone on: the end of its
        prompt, and the ends of earlier answers. The next turn starts from this one."""
        if snapshot.node is None:
            return
        before = snapshot.previous
        for _ in range(_MAX_SUPERSEDED):
            if before is None:
                return
            if before.kind in _SUPERSEDED and before.node is not None:
                before.expected = -float(before.hits)
                self._ledger.refresh_snapshot(before)
                self._ledger.refresh_unit(before.node.block)
            before = before.previous


class Leasing:
    """Opens, feeds and closes leases: the part of the cache that requests use.

    Attributes:
        leases: the open ones, oldest first.
        answer_ends: keeps the states at the ends of answers.
        places: learns where snapshots pay.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.leases: dict[Lease, None] = {}
        self.config = ledger.config
        self._ledger = ledger
        self._suspensions = Suspensions(ledger)
        self._evictor = Evictor(ledger, self._suspensions)
        self._timed_pins = TimedPins(ledger)
        self.answer_ends = AnswerEnds(ledger, self._evictor)
        config = ledger.config
        self.places = Places(
            config.block_size,
            config.num_snapshot_rows,
            config.min_snapshot_gain * config.block_size,
            learned=config.learned_places,
        )
        ledger.events.snapshot_evicted.subscribe(lambda snapshot: self.places.evicted())

    def open(self, match: Match | None, *, private: bool = False) -> Lease:
        """Pin everything that a match found; None: open an empty lease. Never fails on a fresh
        match.

        A private lease is empty, and nothing that it computes is published.
        """
        assert not (private and match is not None), "a private lease shares nothing"
        lease = Lease(private=private)
        self.leases[lease] = None
        if match is None:
            lease.expert_rows = []
            return lease
        ledger = self._ledger
        assert match.version == ledger.version, "the match is stale: something was evicted since"
        lease.blocks = list(match.blocks)
        lease.num_shared = len(match.blocks)
        lease.shared_tokens = match.kv_tokens
        lease.boundary = lease.length = lease.prefilled = match.boundary
        lease.exact = match.exact
        lease.path = list(match.nodes)
        lease.tail = match.tail
        lease.answered = match.tail.answered if match.tail is not None else 0
        lease.snapshot = match.snapshot
        for node in lease.path:
            ledger.pin(node)
        if lease.tail is not None:
            ledger.pin(lease.tail)
        if lease.snapshot is not None:
            ledger.pin_snapshot(lease.snapshot)
            lease.src_row = lease.snapshot.row
        seed(lease, self.config.block_size)
        self._expect(lease, match.pending_key)
        return lease

    def take_row(self, lease: Lease) -> bool:
        """Give the lease its live row; return False, without any change, if none is available.

        It takes a free row, or evicts. As a last resort, a lease that is the only reader of its
        snapshot continues in the snapshot's own row. A model without state layers needs no row.
        """
        assert lease.state is LeaseState.OPEN
        if not self.config.has_state:
            return True
        assert lease.row < 0, "the lease has a row"
        rows = self._ledger.rows
        if not rows.may_go_live:
            return False
        if self._evictor.make_row():
            lease.row = rows.take(RowState.LIVE)
            return True
        if lease.snapshot is not None and lease.snapshot.pins == 1:
            lease.row = self._ledger.steal_snapshot(lease.snapshot)
            lease.snapshot = None
            return True
        return False

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Acquire blocks for `num_tokens` tokens in total; return False, without any change, if too
        few are left.

        After a hit on a tail, the first call also requests a copy of its rows (`lease.copies`).
        """
        assert lease.state is LeaseState.OPEN
        missing = self._blocks_for(num_tokens) - len(lease.blocks)
        if missing <= 0:
            return True
        if not self._evictor.make_blocks(missing):
            # A request that runs alone must always fit, so it alone may release timed pins.
            if len(self.leases) > 1 or missing > self.config.num_blocks - len(lease.held_blocks):
                return False
            while not self._evictor.make_blocks(missing):
                self._timed_pins.give_way()
        first = len(lease.blocks)
        lease.blocks.extend([self._ledger.blocks.take().id for _ in range(missing)])
        if lease.tail is not None and first * self.config.block_size < lease.boundary:
            rows = lease.boundary - lease.shared_tokens
            lease.copies = ((lease.tail.block.id, lease.blocks[first], rows),)
        return True

    def shrink(self, lease: Lease, num_tokens: int) -> None:
        """Return the blocks beyond `num_tokens` tokens, after drafts were rejected."""
        assert lease.state is LeaseState.OPEN and num_tokens >= lease.length
        while len(lease.blocks) > max(self._blocks_for(num_tokens), lease.num_shared):
            self._ledger.let_go(self._ledger.blocks[lease.blocks.pop()])

    def reserve_snapshot(self, lease: Lease, position: int, kind: str) -> int | None:
        """Return a row for the state after `position` tokens, or None to skip the snapshot. Never
        fails.

        `position` must be a cut point outside spans, beyond the computed tokens. A repeated call
        returns the same row.
        """
        assert lease.state is LeaseState.OPEN
        assert position > lease.length, "the state at this position has gone by"
        if lease.private or not (self.config.has_state and self.config.enabled):
            return None
        if position in lease.reserved:
            return lease.reserved[position].row
        depth, rest = divmod(position, self.config.block_size)
        if rest == 0 and depth <= len(lease.path) and lease.path[depth - 1].snapshot is not None:
            return None
        expected = self.places.expected(lease.planned, kind)
        if not (self._pays(lease, position, kind, expected) and self._evictor.make_row()):
            self._ledger.events.counted.publish(("skips", kind))
            return None
        row = self._ledger.rows.take(RowState.RESERVED)
        snapshot = lease.reserved[position] = Snapshot(row, position, kind)
        snapshot.expected = expected
        return row

    def commit(
        self,
        lease: Lease,
        keys: PromptKeys,
        length: int,
        *,
        exact_until: int,
        answer_start: int | None = None,
        experts: Rows | None = None,
        logprobs: RowPiece | None = None,
    ) -> None:
        """Publish tokens `[0, length)`, which are computed now, and the snapshots up to there.

        Tokens from `exact_until` on were computed by decode steps, and those from `answer_start` on
        were generated. The first commit releases the restore pins. Committing the same length again
        changes nothing. With `CacheConfig.exact_only`, a decode step's commit publishes nothing.

        `experts` are the routed expert rows `[n, layers, top_k]` of the n tokens computed since the
        last commit. Nodes without rows get them, whoever created the nodes. `logprobs` are all
        prompt log-probabilities that the request knows, for passed nodes with fewer of them.
        """
        assert lease.state is LeaseState.OPEN
        assert lease.length <= length <= len(keys), "a commit goes forward, within its tokens"
        assert length <= len(lease.blocks) * self.config.block_size, "tokens without a block"
        if length == lease.length:
            return
        now = self._ledger.tick()
        if not lease.committed:
            self._count_use(lease, now)
        if lease.hit is not None:
            self._ledger.events.hit.publish(lease.hit)
            lease.hit = None
        kept = length <= exact_until or not self.config.exact_only
        assert kept or lease.length >= exact_until, "prefill and decode in one commit"
        if kept and self.config.enabled and not lease.private:
            if lease.reserved or (keys.cuts and keys.cuts[-1] > lease.length):
                Publisher(self._ledger, lease, keys, length, exact_until, answer_start).publish()
            record(self._ledger, lease, keys, length, experts)
            if logprobs is not None:
                ledger = self._ledger
                root = ledger.trie.root(keys.root)
                keep(ledger.logprobs, root, lease, keys, length, logprobs)
            depth, coming = len(lease.path), len(keys.block_keys)
            if self.config.exact_only:
                coming = min(coming, exact_until // self.config.block_size)
            self._expect(lease, keys.block_keys[depth] if depth < coming else None)
        self._release_restore(lease)
        lease.committed = True
        lease.length = length
        lease.prefilled = min(length, exact_until)
        lease.copies = ()
        lease.src_row = lease.row

    def abandon(self, lease: Lease) -> None:
        """Return the lease's reserved rows after a failed step; nothing of the step is
        published."""
        assert lease.state is LeaseState.OPEN
        for position in sorted(lease.reserved):
            row = lease.reserved.pop(position).row
            self._ledger.rows.change(row, RowState.RESERVED, RowState.FREE)
        self.answer_ends.drop_trailing(lease)

    def close(self, lease: Lease, left: LeftState | None = None) -> None:
        """Return everything: pins, own blocks, live row, reservations.

        Args:
            left: given if the live row holds the state after all of the lease's tokens. At a cut
                point it becomes the snapshot there, if there is none.
        """
        assert lease.state is LeaseState.OPEN, f"the lease is {lease.state.value}"
        ledger = self._ledger
        self.abandon(lease)
        if left is not None:
            give_row(ledger, lease, left)
        self._release_restore(lease)
        self._expect(lease, None)
        if lease.committed:
            now = ledger.tick()
            for node in lease.path:
                ledger.touch(node, now)
        for node in reversed(lease.path):
            ledger.unpin(node)
        for block in lease.own_blocks:
            ledger.let_go(ledger.blocks[block])
        if lease.row >= 0:
            ledger.rows.change(lease.row, RowState.LIVE, RowState.FREE)
        lease.state = LeaseState.CLOSED
        del self.leases[lease]

    def fork(self, parent: Lease) -> Lease | None:
        """Open a second lease at the same position (n > 1); return None, without any change, if
        space is short.

        It shares the full blocks, copies the rows of the partial one (`copies`), and has its own
        row. The caller copies the parent's row into it before the next step.
        """
        assert parent.state is LeaseState.OPEN and parent.committed, "nothing to fork"
        ledger, block_size = self._ledger, self.config.block_size
        needs_row = self.config.has_state
        if needs_row and not (ledger.rows.may_go_live and self._evictor.can_make_row):
            return None
        full, rest = divmod(parent.length, block_size)
        if not self._evictor.make_blocks(1 if rest else 0):
            return None
        lease = Lease(
            blocks=parent.blocks[: max(full, parent.num_shared)],
            boundary=parent.boundary,
            length=parent.length,
            prefilled=parent.prefilled,
            exact=parent.exact,
            private=parent.private,
            answered=parent.answered,
            num_shared=parent.num_shared,
            path=list(parent.path),
            planned=parent.planned,
            expert_seed=parent.expert_seed,
            expert_rows=None if parent.expert_rows is None else list(parent.expert_rows),
        )
        self.leases[lease] = None
        lease.shared_tokens = len(lease.blocks) * block_size
        for node in lease.path:
            ledger.pin(node)
        for block in lease.own_blocks:
            ledger.blocks.harden(ledger.blocks[block])
        if lease.shared_tokens < parent.length:
            lease.copy_source = parent.blocks[full]
            ledger.blocks.harden(ledger.blocks[lease.copy_source])
            lease.blocks.append(ledger.blocks.take().id)
            lease.copies = ((lease.copy_source, lease.blocks[full], rest),)
        if needs_row:
            took = self.take_row(lease)
            assert took, "a row was there to have"
            lease.src_row = lease.row
        return lease

    def suspend(self, lease: Lease) -> Suspended | None:
        """Preempt a request: its state and private blocks stay until something needs them.

        Returns None if nothing was computed since the lease was opened; it is then simply closed.
        """
        assert lease.state is LeaseState.OPEN
        if not lease.committed:
            self.close(lease)
            return None
        self.abandon(lease)
        self._expect(lease, None)
        self.shrink(lease, lease.length)
        del self.leases[lease]
        return self._suspensions.add(lease)

    def resume(self, suspended: Suspended) -> Lease | None:
        """Reopen a suspended lease with its row live again.

        Returns None if it has been evicted, or if no more rows may be live now. In the latter case
        it stays valid: a finished request may hold its row until a forked choice has read it.
        """
        if suspended.lease is None:
            return None
        if suspended.lease.row >= 0 and not self._ledger.rows.may_go_live:
            return None
        lease = self._suspensions.resume(suspended)
        self.leases[lease] = None
        return lease

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _pays(self, lease: Lease, position: int, kind: str, expected: float) -> bool:
        """Return True if a row is free, or a snapshot is expected to save what evicting another one
        for it costs. Others wait for a junction."""
        if expected >= 1.0 or kind == "junction" or self._ledger.rows.num_free:
            return True
        before = max([lease.boundary, *(p for p in lease.reserved if p < position)])
        return expected * (position - before) >= self.places.price

    def _count_use(self, lease: Lease, now: int) -> None:
        """Count a hit as a use, after its first step has succeeded."""
        for node in lease.path if lease.tail is None else [*lease.path, lease.tail]:
            node.hits += 1
            self._ledger.touch(node, now)
            self._ledger.used(node)
        if lease.snapshot is not None:
            lease.snapshot.hits += 1
            self._ledger.touch_snapshot(lease.snapshot, now)

    def _release_restore(self, lease: Lease) -> None:
        """Unpin the blocks and snapshot that the first step read."""
        ledger = self._ledger
        if lease.snapshot is not None:
            ledger.unpin_snapshot(lease.snapshot)
            lease.snapshot = None
        if lease.tail is not None:
            ledger.unpin(lease.tail)
            lease.tail = None
        if lease.copy_source >= 0:
            ledger.let_go(ledger.blocks[lease.copy_source])
            lease.copy_source = -1

    def _expect(self, lease: Lease, key: bytes | None) -> None:
        """Record which block the lease publishes next, so that others see it is in flight."""
        pending = self._ledger.pending
        if lease.pending_key is not None:
            pending[lease.pending_key] -= 1
            if not pending[lease.pending_key]:
                del pending[lease.pending_key]
        lease.pending_key = key
        if key is not None:
            pending[key] = pending.get(key, 0) + 1
