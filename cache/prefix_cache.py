"""The joint KV and state prefix cache: the single object that the scheduler uses.

It hands out ids of blocks and rows and touches no tensor. A request goes through `match -> open ->
take_row -> grow -> reserve_snapshot -> (forward) -> commit -> ... -> close`. Nothing that a step
wrote can be matched before its `commit`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import numpy as np

from vlm_serve.cache.answer_ends import AnswerEnds
from vlm_serve.cache.audit import AuditedState, audit
from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.events import CacheStats
from vlm_serve.cache.eviction import Evictor
from vlm_serve.cache.experts import ExpertPiece, cached_rows, record, seed
from vlm_serve.cache.ledger import Ledger
from vlm_serve.cache.listing import CacheUsage, usage
from vlm_serve.cache.logprobs import RowPiece, WantedRows, keep, kept_rows
from vlm_serve.cache.matching import Boundaries, Match, find_boundaries, miss_reason
from vlm_serve.cache.placement import REGULAR, Places
from vlm_serve.cache.pools import RowState
from vlm_serve.cache.publishing import LeftState, Publisher, give_row
from vlm_serve.cache.records import Hit, Lease, LeaseState, Node, Rows, Snapshot
from vlm_serve.cache.suspension import Suspended, Suspensions, change_holds
from vlm_serve.cache.tiers.lookup import TierQuery
from vlm_serve.cache.timed_pins import TimedPins

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vlm_serve.cache.node_table import Slots
    from vlm_serve.cache.tiers.entry import Origin
    from vlm_serve.preprocess.identity.keys import PromptKeys

__all__ = ["CacheConfig", "Lease", "LeftState", "Match", "PrefixCache", "Suspended"]


class PrefixCache:
    """Blocks, state rows, the trie over them, and their holders.

    Not thread-safe: the engine thread owns it. Misuse (closing twice, committing backwards, a stale
    match) raises AssertionError; exhaustion never raises.

    Args:
        config: sizes and switches.

    Attributes:
        ledger: the books behind it, which only this package changes.
        events: changes of the cache, for subscribers.
        stats: counters.
        leases: the open ones, oldest first.
        timed_pins: prefixes kept until a given time.
        answer_ends: keeps the states at the ends of answers.
        places: learns where snapshots pay.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.ledger = ledger = Ledger(config)
        self.events = ledger.events
        self.stats = CacheStats()
        self.stats.listen(self.events, config.block_size)
        self.leases: dict[Lease, None] = {}
        self._suspensions = Suspensions(ledger)
        self._evictor = Evictor(ledger, self._suspensions)
        self.timed_pins = TimedPins(ledger)
        self.answer_ends = AnswerEnds(ledger, self._evictor)
        self.places = Places(
            config.block_size,
            config.num_snapshot_rows,
            config.least_gain,
            learned=config.learned_places,
        )

    # Matching

    def bring_marks(self, keys: PromptKeys) -> None:
        """Add the cut points that earlier prompts have marked where this one is the same, so that
        it finds what ends there, on the device and below."""
        keys.bring(self.ledger.marks.cuts(keys))

    def match(
        self,
        keys: PromptKeys,
        *,
        limit: int,
        length: int | None = None,
        complete_experts: bool = False,
        logprobs: WantedRows | None = None,
    ) -> Match:
        """Return the deepest boundary <= `limit` from which a request with these keys can start.
        Pure.

        `limit` is at most the number of tokens less one: one token is always computed. Blocks
        beyond `length` tokens are not shared either; None: all may be.
        `complete_experts` clamps the boundary to where routed expert rows are complete. `logprobs`
        clamps it so that the first missing one of those rows is computed: the row of token i is
        computed at the token before it.
        """
        assert limit < max(1, len(keys)), "at least one token is always computed"
        if not self.config.enabled:
            return Match(reason="disabled", root=keys.root)
        ledger = self.ledger
        blocks = len(keys.block_keys)
        if length is not None:
            blocks = min(blocks, length // self.config.block_size)
        path, bounds = self._find(keys, limit, depth=blocks, complete_experts=complete_experts)
        reason = miss_reason(ledger, keys, limit, path, bounds)
        kept: tuple[RowPiece, ...] = ()
        if logprobs is not None:
            kept = kept_rows(ledger.trie.root(keys.root), path, keys, logprobs)
            limit = min(limit, (kept[-1].end if kept else logprobs.first) - 1)
            free = bounds.usable
            bounds = self._boundaries(path, keys, limit, complete_experts=complete_experts)
            reason = "prompt_logprobs" if bounds.usable < free else reason
        slots = ledger.nodes.slots(path)
        # Nothing exact is published behind an inexact node.
        exact = all(
            part is None or part.exact for part in (*path[-1:], bounds.tail, bounds.snapshot)
        )
        gain = self.config.least_gain
        missing = len(path) < blocks
        return Match(
            boundary=bounds.usable,
            kv_boundary=bounds.kv,
            kv_tokens=len(path) * self.config.block_size,
            state_boundary=bounds.state,
            snapshot=bounds.snapshot,
            exact=exact,
            reason=reason,
            blocks=tuple(ledger.nodes.blocks[slots].tolist()),
            junction=self.config.has_state and bounds.kv - bounds.state >= gain,
            limit=limit,
            logprobs=kept,
            nodes=tuple(path),
            tail=bounds.tail,
            pending_key=keys.block_keys[len(path)] if missing else None,
            version=ledger.version,
            root=keys.root,
            answered=self._answered(path, slots, bounds),
        )

    def _answered(self, path: list[Node], slots: Slots, bounds: Boundaries) -> int:
        """Return how many tokens up to the usable boundary the model generated."""
        used = slots[: bounds.usable // self.config.block_size]
        tail = 0 if bounds.tail is None else bounds.tail.answered
        if bounds.tail is None and bounds.usable % self.config.block_size:
            node = path[len(used)]
            tail = max(0, node.answered - (node.end - bounds.usable))
        return int(self.ledger.nodes.answered[used].sum()) + tail

    def record(
        self,
        lease: Lease,
        match: Match,
        num_prompt_tokens: int,
        *,
        used: int | None = None,
        replay: bool = False,
        joined_tokens: int = 0,
        joined_ms: float = 0.0,
    ) -> None:
        """Record an admission; it is published once the lease's first step has succeeded.
        Recomputation after preemption (`replay`) counts as neither hit nor miss.

        `used` tokens were taken from the cache: 0 if the request ran without its match. For
        `joined_tokens` of them it has waited `joined_ms` until another request had computed them.
        """
        events = self.ledger.events
        if replay:
            events.counted.publish(("replays", ""))
        elif events.hit.subscribers:
            used = match.boundary if used is None else used
            full = match.nodes[: -(-used // self.config.block_size)]
            deepest = match.tail if match.tail is not None else full[-1] if full else None
            lease.hit = Hit(
                key=deepest.key if used and deepest is not None else b"",
                prompt_tokens=num_prompt_tokens,
                kv_boundary=match.kv_boundary,
                state_boundary=match.state_boundary,
                boundary=used,
                reason=match.reason,
                root=match.root,
                joined_tokens=joined_tokens,
                joined_ms=joined_ms,
            )

    def learn(
        self,
        lease: Lease,
        match: Match,
        keys: PromptKeys,
        num_prompt_tokens: int,
        positions: Mapping[int, str],
    ) -> None:
        """Learn from a prompt's admission: its parting from known prompts, its misses, its plans.

        Args:
            positions: planned snapshots by position, each with its kind.
        """
        if not (self.config.has_state and self.config.enabled):
            return
        node, places = self._parting_node(match, keys), self.places
        if node is not None and node.planned is not None:
            places.parted(node.planned, match.kv_boundary)
        self.ledger.spare_snapshots.admit(places.horizon)
        owner = keys.owners.prompt
        lease.planned = places.plan(owner, lease.boundary, num_prompt_tokens, positions)
        if node is not None and positions.get(match.kv_boundary) == "junction":
            node.planned = lease.planned  # the snapshot there is this request's

    def junction(self, match: Match, keys: PromptKeys) -> int:
        """Return a request's place for a snapshot by prompts parting there; 0: none."""
        if match.junction:
            return match.kv_boundary
        gain = match.kv_boundary - match.state_boundary
        if gain <= 0 or not self.config.has_state:
            return 0
        node = self._parting_node(match, keys)
        if node is None or node.planned is None:
            return 0
        due = self.places.is_junction(node.planned, match.kv_boundary, gain)
        return match.kv_boundary if due else 0

    def _parting_node(self, match: Match, keys: PromptKeys) -> Node | None:
        """Return the node with the last common token of a prompt and the trie at a cut."""
        cut = match.kv_boundary
        depth, rest = divmod(cut, keys.block_size)
        if not cut:
            return None
        if not rest or depth < len(match.nodes):
            return match.nodes[depth if rest else depth - 1]
        parent = match.nodes[depth - 1] if depth else self.ledger.trie.root(keys.root)
        return None if parent is None else parent.children.get(keys.tails[cut])

    def snapshot_positions(self, keys: PromptKeys, limit: int) -> tuple[int, ...]:
        """Return the cut points up to `limit` that have a state."""
        if not self.config.has_state:
            return ()
        trie, nodes, size = self.ledger.trie, self.ledger.nodes, keys.block_size
        path = trie.path(keys, limit // size)
        ends = (np.flatnonzero(nodes.has_snapshot[nodes.slots(path)]) + 1) * size
        tails = ((cut, trie.nodes.get(key)) for cut, key in keys.tails.items() if cut <= limit)
        inner = [cut for cut, node in tails if node is not None and node.snapshot is not None]
        return tuple(sorted([*ends.tolist(), *inner]))

    def deepest_boundary(self, keys: PromptKeys, limit: int, snapshots: Sequence[int]) -> int:
        """Return the deepest boundary from which a longer prompt with these tokens could start now.

        Args:
            keys, limit: of the prompt, as for `snapshot_positions`.
            snapshots: what that has returned; they are the boundaries of a model with state.
        """
        if self.config.has_state or not self.config.enabled:
            return max(snapshots, default=0)
        return self._find(keys, limit, complete_experts=False)[1].usable

    def node_at(self, keys: PromptKeys, cut: int) -> Node | None:
        """Return the node ending at a cut point; None if it is not in the trie."""
        trie = self.ledger.trie
        path = trie.path(keys, cut // keys.block_size)
        return trie.node_at(path, keys, cut)

    # The life of a request

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
        ledger = self.ledger
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
        ledger.hold_path(lease.path, pins=1)
        if lease.tail is not None:
            ledger.pin(lease.tail)
        if lease.snapshot is not None:
            ledger.pin_snapshot(lease.snapshot)
            lease.src_row = lease.snapshot.row
        lease.expert_rows = None if lease.boundary % self.config.block_size else []
        if ledger.expert_bytes:
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
        rows = self.ledger.rows
        if not rows.may_go_live:
            return False
        if self._evictor.make_row():
            lease.row = rows.take(RowState.LIVE)
            return True
        if lease.snapshot is not None and lease.snapshot.pins == 1:
            lease.row = self.ledger.steal_snapshot(lease.snapshot)
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
                self.timed_pins.give_way()
        first = len(lease.blocks)
        lease.blocks.extend([self.ledger.blocks.take().id for _ in range(missing)])
        if lease.tail is not None and first * self.config.block_size < lease.boundary:
            rows = lease.boundary - lease.shared_tokens
            lease.copies = ((lease.tail.block.id, lease.blocks[first], rows),)
        return True

    def take_moved(self, lease: Lease) -> int:
        """Return the first entry of a lease's blocks that has been replaced since the last call, or
        their number if none has."""
        first, lease.moved = lease.moved, None
        return len(lease.blocks) if first is None else first

    def shrink(self, lease: Lease, num_tokens: int) -> None:
        """Return the blocks beyond `num_tokens` tokens, after drafts were rejected."""
        assert lease.state is LeaseState.OPEN and num_tokens >= lease.length
        while len(lease.blocks) > max(self._blocks_for(num_tokens), lease.num_shared):
            self.ledger.let_go(self.ledger.blocks[lease.blocks.pop()])

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
        # Prompts have parted at a junction. Elsewhere the row must be worth what goes for it.
        worth = None if kind == "junction" else float(expected) * self._gain(lease, position)
        if not self._evictor.make_row(worth):
            self.ledger.events.counted.publish(("skips", kind))
            return None
        row = self.ledger.rows.take(RowState.RESERVED)
        lease.reserved[position] = Snapshot(row, position, kind, expected)
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

        `experts` are the routed expert rows `[n, layers, top_k]` of the tokens computed since the
        last commit, and perhaps of further ones. Nodes without rows get them, whoever created the
        nodes. `logprobs` are all prompt log-probabilities that the request knows, for passed nodes
        with fewer of them.
        """
        assert lease.state is LeaseState.OPEN
        assert lease.length <= length <= len(keys), "a commit goes forward, within its tokens"
        assert length <= len(lease.blocks) * self.config.block_size, "tokens without a block"
        if length == lease.length:
            return
        now = self.ledger.tick()
        if not lease.committed:
            self._count_use(lease, now)
        if lease.hit is not None:
            self.ledger.events.hit.publish(lease.hit)
            lease.hit = None
        kept = length <= exact_until or not self.config.exact_only
        assert kept or lease.length >= exact_until, "prefill and decode in one commit"
        if kept and self.config.enabled and not lease.private:
            if lease.reserved or (keys.cuts and keys.cuts[-1] > lease.length):
                Publisher(self.ledger, lease, keys, length, exact_until, answer_start).publish()
            if experts is not None:
                record(self.ledger, lease, keys, length, experts)
            else:
                lease.expert_rows = None if length % self.config.block_size else []
            if logprobs is not None:
                ledger = self.ledger
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

    def advance(self, lease: Lease, keys: PromptKeys, length: int) -> bool:
        """Commit one decoded token of a lease, if that publishes nothing: no cut point lies at
        `length`. Return False, without any change, if `commit` has to."""
        cuts = keys.cuts
        if lease.reserved or (cuts and cuts[-1] > lease.length) or lease.hit is not None:
            return False
        if not lease.committed or length != lease.length + 1 or not length % self.config.block_size:
            return False
        lease.length, lease.expert_rows = length, None
        return True

    def abandon(self, lease: Lease) -> None:
        """Return the lease's reserved rows after a failed step; nothing of the step is
        published."""
        assert lease.state is LeaseState.OPEN
        for position in sorted(lease.reserved):
            row = lease.reserved.pop(position).row
            self.ledger.rows.change(row, RowState.RESERVED, RowState.FREE)
        if lease.trailing is not None:
            self.answer_ends.drop_trailing(lease)

    def close(self, lease: Lease, left: LeftState | None = None) -> None:
        """Return everything: pins, own blocks, live row, reservations.

        Args:
            left: given if the live row holds the state after all of the lease's tokens. At a cut
                point it becomes the snapshot there, if there is none.
        """
        assert lease.state is LeaseState.OPEN, f"the lease is {lease.state.value}"
        ledger = self.ledger
        self.abandon(lease)
        if left is not None:
            give_row(ledger, lease, left)
        self._release_restore(lease)
        self._expect(lease, None)
        if lease.committed:
            ledger.use_path(lease.path, ledger.tick(), hits=0)
        change_holds(ledger, lease, ledger.let_go, LeaseState.CLOSED)
        del self.leases[lease]

    def fork(self, parent: Lease) -> Lease | None:
        """Open a second lease at the same position (n > 1); return None, without any change, if
        space is short.

        It shares the full blocks, copies the rows of the partial one (`copies`), and has its own
        row. The caller copies the parent's row into it before the next step.
        """
        assert parent.state is LeaseState.OPEN and parent.committed, "nothing to fork"
        ledger, block_size = self.ledger, self.config.block_size
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
            old_path=parent.old_path,
            answered=parent.answered,
            num_shared=parent.num_shared,
            path=list(parent.path),
            planned=parent.planned,
            expert_seed=parent.expert_seed,
            expert_rows=None if parent.expert_rows is None else list(parent.expert_rows),
        )
        self.leases[lease] = None
        lease.shared_tokens = len(lease.blocks) * block_size
        ledger.hold_path(lease.path, pins=1)
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
        if suspended.lease.row >= 0 and not self.ledger.rows.may_go_live:
            return None
        lease = self._suspensions.resume(suspended)
        self.leases[lease] = None
        return lease

    def expect(self, node: Node, change: int) -> None:
        """Change the number of waiting requests that are about to use a node. They raise the value
        of its entries and pin nothing."""
        self.ledger.expect(node, change)

    def drop(self, suspended: Suspended, left: LeftState | None = None) -> None:
        """Return the resources of a suspended request, if it has not been evicted.

        Args:
            left: as for `close`.
        """
        if suspended.valid:
            self._suspensions.drop(suspended, left)

    def seclude(self, lease: Lease) -> None:
        """Publish nothing more of a running or suspended request: other weights compute on."""
        assert lease.state is not LeaseState.CLOSED
        if lease.state is LeaseState.OPEN:
            self.abandon(lease)
            self._expect(lease, None)
        lease.private, lease.old_path = True, len(lease.path)

    def cached_experts(self, lease: Lease) -> tuple[ExpertPiece, ...]:
        """Return the expert rows of tokens `[0, lease.boundary)`, in order; pieces without rows are
        gaps."""
        return cached_rows(lease, self.config.block_size)

    # Lower tiers

    def tier_query(
        self, keys: PromptKeys, match: Match, *, limit: int, origin: Origin, least: int = 0
    ) -> TierQuery | None:
        """Describe what lower tiers could add to a fresh match: at least `min_snapshot_gain`
        blocks, from `least` up to `limit`. Returns None if nothing. Pure."""
        if not self.config.enabled:
            return None
        size, depth = self.config.block_size, len(match.nodes)
        least = max(match.boundary + self.config.min_snapshot_gain * size, least)
        last = bisect_right(keys.cuts, limit)
        if last == 0 or keys.cuts[last - 1] < least:
            return None
        branch = match.nodes[-1] if depth else self.ledger.trie.root(keys.root)
        cuts = keys.cuts[bisect_right(keys.cuts, depth * size) :]
        tails = [keys.tails[cut] for cut in cuts[: bisect_left(cuts, (depth + 1) * size)]]
        above = frozenset(key for key in tails if branch is not None and key in branch.children)
        has_state = self.config.has_state
        return TierQuery(keys, match.boundary, least, limit, depth, above, has_state, origin)

    def nodes(self) -> Iterator[Node]:
        """Yield every node with its snapshot, parents before children. Read-only."""
        return self.ledger.trie.walk()

    # Gauges and upkeep

    @property
    def free_block_count(self) -> int:
        """Number of empty blocks."""
        return self.ledger.blocks.num_free

    @property
    def free_row_count(self) -> int:
        """Number of state rows that hold nothing."""
        return self.ledger.rows.num_free

    @property
    def available_block_count(self) -> int:
        """Number of blocks that `grow` can hand out, evicting if necessary."""
        return self.ledger.blocks.num_free + self.ledger.blocks.num_reclaimable

    @property
    def version(self) -> tuple[int, ...]:
        """Unchanged as long as no match can find more content or other free space."""
        ledger, rows = self.ledger, self.ledger.rows
        return (
            ledger.version,
            ledger.additions,
            ledger.expert_bytes,
            ledger.logprobs.additions,
            self.available_block_count,
            rows.num_free,
            rows.num_live,
            len(ledger.spare_snapshots),
            len(self._suspensions.leases),
            len(self.leases),
        )

    @property
    def usage(self) -> CacheUsage:
        """Gauges of blocks, nodes, rows and expert rows."""
        return usage(self.ledger)

    def pin(
        self,
        keys: PromptKeys,
        until: float,
        owner: bytes | None = None,
        *,
        limit: int | None = None,
    ) -> int:
        """Keep the KV and the state of a prompt's deepest usable prefix until time `until`.

        Args:
            owner: the pin's owner; None: the prompt's root.
            limit: most tokens of the prefix; None: all may be.

        Pinning a prefix again changes its expiry. Returns the tokens pinned. That is 0 if nothing
        is cached, or if pins would hold more than half of the blocks or more snapshots than the
        budget has rows.
        """
        if not self.config.enabled:
            return 0
        limit = len(keys) if limit is None else limit
        path, bounds = self._find(keys, limit, complete_experts=False)
        if not bounds.usable:
            return 0
        size = self.config.block_size
        nodes = path[: bounds.usable // size if bounds.tail else -(-bounds.usable // size)]
        if bounds.tail is not None:
            nodes.append(bounds.tail)
        return bounds.usable if self.timed_pins.add(nodes, bounds.snapshot, until, owner) else 0

    def empty(self) -> None:
        """Evict everything while no request holds anything, timed pins included. What it was is
        remembered, and the pools' memory may be given back."""
        assert not self.leases
        self.timed_pins.clear()
        self._evictor.evict_everything()
        for pool in (self.ledger.blocks, self.ledger.rows):
            pool.untouch()

    def flush(self) -> None:
        """Evict everything that no running request holds, timed pins included, and forget it."""
        self.timed_pins.clear()
        self._evictor.evict_everything()
        self.ledger.evicted_nodes.clear()
        self.ledger.evicted_snapshots.clear()
        self.ledger.marks.clear()

    def check(self, wanted: Callable[[], bool] = lambda: False) -> bool:
        """Recompute every invariant; AssertionError names the violated one.

        Args:
            wanted: returns True to interrupt the check, because the thread has other work; called
                often.

        Returns:
            True if the check ran to its end.
        """
        books = AuditedState(
            self.ledger,
            list(self.leases),
            list(self._suspensions.leases.items()),
            self.timed_pins.pins,
        )
        return audit(books, wanted)

    def _find(
        self, keys: PromptKeys, limit: int, *, depth: int | None = None, complete_experts: bool
    ) -> tuple[list[Node], Boundaries]:
        """Return the matched full nodes, at most `depth`, and the boundaries along them."""
        path = self.ledger.trie.path(keys, depth)
        return path, self._boundaries(path, keys, limit, complete_experts=complete_experts)

    def _boundaries(
        self, path: list[Node], keys: PromptKeys, limit: int, *, complete_experts: bool
    ) -> Boundaries:
        return find_boundaries(
            self.ledger.trie,
            path,
            keys,
            limit,
            has_state=self.config.has_state,
            complete_experts=complete_experts,
        )

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _gain(self, lease: Lease, position: int) -> int:
        """Return the tokens that a snapshot saves over those before it, regular ones left out: they
        are likely to go first."""
        kept = (place for place, other in lease.reserved.items() if other.kind not in REGULAR)
        return position - max([lease.boundary, *(place for place in kept if place < position)])

    def _count_use(self, lease: Lease, now: int) -> None:
        """Count a hit as a use, after its first step has succeeded."""
        path = lease.path if lease.tail is None else [*lease.path, lease.tail]
        self.ledger.use_path(path, now)
        if lease.snapshot is not None:
            lease.snapshot.hits += 1
            self.ledger.touch_snapshot(lease.snapshot, now)

    def _release_restore(self, lease: Lease) -> None:
        """Unpin the blocks and snapshot that the first step read."""
        ledger = self.ledger
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
        pending = self.ledger.pending
        if lease.pending_key is not None:
            pending[lease.pending_key] -= 1
            if not pending[lease.pending_key]:
                del pending[lease.pending_key]
        lease.pending_key = key
        if key is not None:
            pending[key] = pending.get(key, 0) + 1
