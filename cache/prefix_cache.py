"""The joint KV and state prefix cache: the one object the scheduler talks to.

It hands out ids of blocks and rows and touches no tensor. A request goes through
`match -> open -> take_row -> grow -> reserve_snapshot -> (forward) -> commit -> ... -> close`;
nothing that a step wrote can be matched before its `commit`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlm_serve.cache.adopting import Arrival, Places, adopt
from vlm_serve.cache.audit import Books, audit
from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.eviction import Evictor
from vlm_serve.cache.experts import ExpertPiece, Rows, cached_rows
from vlm_serve.cache.leases import Lease
from vlm_serve.cache.leasing import Leasing
from vlm_serve.cache.ledger import CacheListener, Ledger, SilentListener
from vlm_serve.cache.listing import CacheUsage, TreePage, tree_page, usage
from vlm_serve.cache.matching import Boundaries, Match, find_boundaries, walk
from vlm_serve.cache.reasons import Evidence, miss_reason
from vlm_serve.cache.suspension import Suspended, Suspensions
from vlm_serve.cache.tiers.lookup import Deeper, find_deeper
from vlm_serve.cache.timed_pins import TimedPins

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vlm_serve.cache.stats import CacheStats
    from vlm_serve.cache.tiers.lookup import Locate
    from vlm_serve.cache.trie import Node
    from vlm_serve.preprocess.keys import PromptKeys

__all__ = ["CacheConfig", "CacheListener", "Lease", "Match", "PrefixCache", "Suspended"]


class PrefixCache:
    """Blocks, state rows, the trie over them, and who holds what.

    Not thread-safe: the engine thread owns it. Misuse (closing twice, committing backwards, a stale
    match) raises AssertionError; exhaustion never raises.

    Args:
        config: sizes and switches.
        listener: told before the content of a block or row stops being valid.
    """

    def __init__(self, config: CacheConfig, listener: CacheListener | None = None) -> None:
        self.config = config
        self._ledger = Ledger(config, listener or SilentListener())
        self._suspensions = Suspensions(self._ledger)
        self._evictor = Evictor(self._ledger, self._suspensions)
        self._timed_pins = TimedPins(self._ledger)
        self._leasing = Leasing(self._ledger, self._evictor, self._suspensions, self._timed_pins)

    # Matching

    def match(self, keys: PromptKeys, *, limit: int, complete_experts: bool = False) -> Match:
        """The deepest boundary <= `limit` that a request with these keys can start from. Pure.

        `limit` is at most the number of tokens less one: one token is always computed.
        With `complete_experts` the boundary is clamped to where routed expert rows are complete.
        """
        assert limit < max(1, len(keys)), "at least one token is always computed"
        if not self.config.enabled:
            return Match(reason="disabled")
        ledger = self._ledger
        path, found = self._find(keys, limit, complete_experts=complete_experts)
        evidence = Evidence(
            ledger.trie, ledger.evicted_nodes, ledger.evicted_snapshots, ledger.pending
        )
        used = [*path, found.tail] if found.tail is not None else path
        exact = found.snapshot is None or found.snapshot.exact
        gain = self.config.min_snapshot_gain * self.config.block_size
        missing = len(path) < len(keys.block_keys)
        return Match(
            boundary=found.usable,
            kv_boundary=found.kv,
            kv_tokens=len(path) * self.config.block_size,
            state_boundary=found.state,
            snapshot=found.snapshot,
            exact=exact and all(node.exact for node in used),
            reason=miss_reason(evidence, keys, limit, path, found),
            blocks=tuple([node.block.id for node in path]),
            junction=self.config.has_state and found.kv - found.state >= gain,
            nodes=tuple(path),
            tail=found.tail,
            pending_key=keys.block_keys[len(path)] if missing else None,
            version=ledger.version,
        )

    def record(
        self,
        match: Match,
        num_prompt_tokens: int,
        *,
        used: int | None = None,
        replay: bool = False,
    ) -> None:
        """Counts an admission. Recomputation after preemption (`replay`) is no hit and no miss.

        `used` tokens were taken from the cache: 0 if the request went on without its match.
        """
        stats = self._ledger.stats
        if replay:
            stats.replays += 1
            return
        stats.requests += 1
        stats.query_tokens += num_prompt_tokens
        stats.hit_tokens += match.boundary if used is None else used
        stats.reasons[match.reason] += 1

    # A request's life

    def open(self, match: Match | None, *, private: bool = False) -> Lease:
        """Pins everything a match found; None: an empty lease. Never fails on a fresh match.

        A private lease is empty, and nothing it computes is published.
        """
        return self._leasing.open(match, private=private)

    def take_row(self, lease: Lease) -> bool:
        """Gives the lease its live row; False, and nothing changed, if there is none to have.

        Takes a free row, else evicts; as a last resort a lease that alone reads its snapshot goes
        on in the snapshot's own row. A model without state layers needs no row.
        """
        return self._leasing.take_row(lease)

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Blocks for `num_tokens` tokens in total; False, and nothing changed, if too few are left.

        After a hit on a tail the first call also asks for its rows to be copied (`lease.copies`).
        """
        return self._leasing.grow(lease, num_tokens)

    def reserve_snapshot(self, lease: Lease, position: int, kind: str) -> int | None:
        """A row for the state after `position` tokens, or None: skip it. Never fails.

        `position` must be a cut point outside spans, beyond what has been computed. Asking twice
        gives the same row.
        """
        return self._leasing.reserve_snapshot(lease, position, kind)

    def commit(
        self,
        lease: Lease,
        keys: PromptKeys,
        length: int,
        *,
        exact_until: int,
        experts: Rows | None = None,
    ) -> None:
        """Tokens `[0, length)` are computed now: publishes them and the snapshots up to there.

        Tokens from `exact_until` on were made by decode steps. Releases the restore pins after the
        first step. Committing the same length again changes nothing.

        `experts` are the routed expert rows `[n, layers, top_k]` of the n tokens computed since the
        last commit; nodes without rows get them, whoever made the nodes.
        """
        self._leasing.commit(lease, keys, length, exact_until, experts)

    def cached_experts(self, lease: Lease) -> tuple[ExpertPiece, ...]:
        """Expert rows of tokens `[0, lease.boundary)`, in order; pieces without rows are gaps."""
        return cached_rows(lease, self.config.block_size)

    def abandon(self, lease: Lease) -> None:
        """The step failed: the lease's reserved rows go back. Nothing of the step is published."""
        self._leasing.abandon(lease)

    def close(self, lease: Lease) -> None:
        """Gives everything back: pins, own blocks, live row, reservations."""
        self._leasing.close(lease)

    def fork(self, lease: Lease) -> Lease | None:
        """A second lease at the same position (n > 1); None, and nothing changed, without room.

        It shares the full blocks, copies the rows of the partial one (`copies`) and has a row of
        its own, into which the caller copies the parent's before the next step.
        """
        return self._leasing.fork(lease)

    # Preemption

    def suspend(self, lease: Lease) -> Suspended | None:
        """Preempts a request: its state and private blocks stay until something needs them.

        None: nothing was computed since the lease was opened, so it is simply closed.
        """
        return self._leasing.suspend(lease)

    def resume(self, suspended: Suspended) -> Lease | None:
        """The lease as it was, its row live again.

        None if it has been evicted, or, while it stays valid, if no more rows may be live now: a
        request that has ended may hold its row until a forked choice has read it.
        """
        return self._leasing.resume(suspended)

    def drop(self, suspended: Suspended) -> None:
        """Gives back what a suspended request holds; nothing if it has been evicted."""
        if suspended.valid:
            self._suspensions.drop(suspended)

    # Lower tiers

    def deeper(
        self, keys: PromptKeys, match: Match, *, limit: int, locate: Locate
    ) -> Deeper | None:
        """What lower tiers could add to a fresh match. `locate` says where an entry is. Pure.

        None if that is less than `min_snapshot_gain` blocks.
        """
        if not self.config.enabled:
            return None
        found = find_deeper(
            self._ledger.trie,
            match,
            keys,
            limit,
            has_state=self.config.has_state,
            locate=locate,
        )
        least = self.config.min_snapshot_gain * self.config.block_size
        return found if found and found.boundary - match.boundary >= least else None

    def adopt(self, keys: PromptKeys, arrival: Arrival, fill: Callable[[Places], None]) -> bool:
        """Takes in what was read from a lower tier, so that the next match finds it.

        `fill` copies it into the blocks and the row it is given; nothing is published before it
        has returned, and nothing is held if it raises. False, and nothing published, if there is
        no room or if what was read no longer meets what the device has.
        """
        match = self.match(keys, limit=arrival.boundary)
        if match.boundary >= arrival.boundary:
            return True
        return adopt(self._ledger, self._leasing, match, keys, arrival, fill)

    def nodes(self) -> Iterator[Node]:
        """Every node with its snapshot, parents before children. Not to be changed."""
        return self._ledger.trie.walk()

    # Gauges and upkeep

    @property
    def stats(self) -> CacheStats:
        return self._ledger.stats

    @property
    def free_block_count(self) -> int:
        """Blocks that hold nothing."""
        return self._ledger.blocks.num_free

    @property
    def available_block_count(self) -> int:
        """Blocks that `grow` can hand out, evicting if need be."""
        return self._ledger.blocks.num_free + self._ledger.blocks.num_reclaimable

    @property
    def version(self) -> tuple[int, ...]:
        """While it stays, no match finds more or other room than before."""
        ledger, rows = self._ledger, self._ledger.rows
        return (
            ledger.version,
            ledger.additions,
            ledger.expert_bytes,
            self.available_block_count,
            rows.num_free,
            rows.num_live,
            len(ledger.spare_snapshots),
            len(self._suspensions),
            len(self._leasing.leases),
        )

    @property
    def usage(self) -> CacheUsage:
        """Gauges of blocks, nodes, rows and expert rows."""
        return usage(self._ledger)

    def tree(self, *, offset: int = 0, limit: int = 100) -> TreePage:
        """A page of the trie, parents before children."""
        return tree_page(self._ledger, offset, limit)

    def pin(self, keys: PromptKeys, until: float) -> int:
        """Keeps the KV and the state of a prompt's deepest usable prefix until time `until`.

        Pinning a prefix again moves its end. Returns the tokens pinned; 0 if nothing is there, or
        if pins would hold more than half of the blocks or more snapshots than the budget has rows.
        """
        if not self.config.enabled:
            return 0
        path, found = self._find(keys, len(keys), complete_experts=False)
        if not found.usable:
            return 0
        size = self.config.block_size
        nodes = path[: found.usable // size if found.tail else -(-found.usable // size)]
        if found.tail is not None:
            nodes.append(found.tail)
        pinned = self._timed_pins.add(tuple(nodes), found.snapshot, until)
        return found.usable if pinned else 0

    def expire(self, now: float) -> int:
        """Releases the pins whose time has come; returns how many."""
        return self._timed_pins.expire(now)

    def flush(self) -> None:
        """Evicts all that no running request holds, timed pins included, and forgets it."""
        self._timed_pins.clear()
        self._evictor.evict_everything()
        self._ledger.evicted_nodes.clear()
        self._ledger.evicted_snapshots.clear()

    def check(self) -> None:
        """Recomputes every invariant; AssertionError names the one that is violated."""
        audit(
            Books(
                self._ledger,
                list(self._leasing.leases),
                self._suspensions.items(),
                self._timed_pins.pins,
            )
        )

    def _find(
        self, keys: PromptKeys, limit: int, *, complete_experts: bool
    ) -> tuple[list[Node], Boundaries]:
        """The matched full nodes and the boundaries along them."""
        trie = self._ledger.trie
        path = walk(trie.root(keys.root), keys)
        has_state = self.config.has_state
        found = find_boundaries(
            trie, path, keys, limit, has_state=has_state, complete_experts=complete_experts
        )
        return path, found
