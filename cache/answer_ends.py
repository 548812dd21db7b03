"""The states at the ends of answers: rows of a lease that become snapshots once it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlm_serve.cache.pools import RowState
from vlm_serve.cache.publishing import Publisher
from vlm_serve.cache.records import Lease, LeaseState, Snapshot

if TYPE_CHECKING:
    from vlm_serve.cache.eviction import Evictor
    from vlm_serve.cache.ledger import Ledger
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
            twice = lease.reserved.get(position)  # of a step that was planned ahead
            if twice is not None:
                self._ledger.rows.change(twice.row, RowState.RESERVED, RowState.FREE)
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
