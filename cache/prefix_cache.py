"""The joint KV and state prefix cache: the single object that the scheduler uses.

It hands out ids of blocks and rows and touches no tensor. A request goes through `match -> open ->
take_row -> grow -> reserve_snapshot -> (forward) -> commit -> ... -> close`. Nothing that a step
wrote can be matched before its `commit`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlm_serve.cache.adopting import Arrival, Destinations, adopt
from vlm_serve.cache.audit import AuditedState, audit
from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.events import CacheStats
from vlm_serve.cache.experts import ExpertPiece, cached_rows
from vlm_serve.cache.leasing import Leasing
from vlm_serve.cache.ledger import Ledger
from vlm_serve.cache.listing import CacheUsage, usage
from vlm_serve.cache.logprobs import RowPiece, WantedRows, kept_rows
from vlm_serve.cache.matching import Boundaries, Match, find_boundaries, walk
from vlm_serve.cache.publishing import LeftState
from vlm_serve.cache.reasons import Evidence, miss_reason
from vlm_serve.cache.records import Hit, Lease, Node
from vlm_serve.cache.suspension import Suspended
from vlm_serve.cache.tiers.lookup import TierQuery, make_tier_query
from vlm_serve.cache.timed_pins import TimedPin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vlm_serve.cache.tiers.entry import Origin
    from vlm_serve.preprocess.identity.keys import PromptKeys

__all__ = ["CacheConfig", "Lease", "LeftState", "Match", "PrefixCache", "Suspended"]


class PrefixCache(Leasing):
    """Blocks, state rows, the trie over them, and their holders.

    Not thread-safe: the engine thread owns it. Misuse (closing twice, committing backwards, a stale
    match) raises AssertionError; exhaustion never raises.

    Args:
        config: sizes and switches.

    Attributes:
        events: changes of the cache, for subscribers.
        stats: counters.
    """

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(Ledger(config))
        self.events = self._ledger.events
        self.stats = CacheStats()
        self.stats.listen(self.events, config.block_size)

    # Matching

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
        ledger = self._ledger
        blocks = len(keys.block_keys)
        if length is not None:
            blocks = min(blocks, length // self.config.block_size)
        path, found = self._find(keys, limit, depth=blocks, complete_experts=complete_experts)
        reason = self._reason(keys, limit, path, found)
        kept: tuple[RowPiece, ...] = ()
        if logprobs is not None:
            kept = kept_rows(ledger.trie.root(keys.root), path, keys, logprobs)
            limit = min(limit, (kept[-1].end if kept else logprobs.first) - 1)
            free = found.usable
            found = self._boundaries(path, keys, limit, complete_experts=complete_experts)
            reason = "prompt_logprobs" if found.usable < free else reason
        used = [*path, found.tail] if found.tail is not None else path
        exact = found.snapshot is None or found.snapshot.exact
        gain = self.config.min_snapshot_gain * self.config.block_size
        missing = len(path) < blocks
        return Match(
            boundary=found.usable,
            kv_boundary=found.kv,
            kv_tokens=len(path) * self.config.block_size,
            state_boundary=found.state,
            snapshot=found.snapshot,
            exact=exact and all(node.exact for node in used),
            reason=reason,
            blocks=tuple([node.block.id for node in path]),
            junction=self.config.has_state and found.kv - found.state >= gain,
            limit=limit,
            logprobs=kept,
            nodes=tuple(path),
            tail=found.tail,
            pending_key=keys.block_keys[len(path)] if missing else None,
            version=ledger.version,
            root=keys.root,
            answered=self._answered(path, found),
        )

    def _answered(self, path: list[Node], found: Boundaries) -> int:
        """Return how many tokens up to the usable boundary the model generated."""
        used = path[: found.usable // self.config.block_size]
        tail = 0 if found.tail is None else found.tail.answered
        if found.tail is None and found.usable % self.config.block_size:
            node = path[len(used)]
            tail = max(0, node.answered - (node.end - found.usable))
        return sum(node.answered for node in used) + tail

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
        events = self._ledger.events
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
        if match.reason == "snapshot_evicted":
            places.missed(match.kv_boundary - match.state_boundary)
        lease.planned = places.plan(match.root, lease.boundary, num_prompt_tokens, positions)
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
        parent = match.nodes[depth - 1] if depth else self._ledger.trie.root(keys.root)
        return None if parent is None else parent.children.get(keys.tails[cut])

    # The rest of a request's life

    def cached_experts(self, lease: Lease) -> tuple[ExpertPiece, ...]:
        """Return the expert rows of tokens `[0, lease.boundary)`, in order; pieces without rows are
        gaps."""
        return cached_rows(lease, self.config.block_size)

    def snapshot_positions(self, keys: PromptKeys, limit: int) -> tuple[int, ...]:
        """Return the cut points up to `limit` that have a state."""
        root = self._ledger.trie.root(keys.root)
        if root is None or not self.config.has_state:
            return ()
        path, size, found = walk(root, keys), keys.block_size, list[int]()
        for cut in keys.cuts:
            depth, rest = divmod(cut, size)
            if cut > limit or depth > len(path):
                break
            before = path[depth - 1] if depth else root
            node = before.children.get(keys.tails[cut]) if rest else path[depth - 1]
            if node is not None and node.snapshot is not None:
                found.append(cut)
        return tuple(found)

    def node_at(self, keys: PromptKeys, cut: int) -> Node | None:
        """Return the node ending at a cut point; None if it is not in the trie."""
        root = self._ledger.trie.root(keys.root)
        depth, rest = divmod(cut, keys.block_size)
        path = walk(root, keys, depth)
        if root is None or len(path) < depth:
            return None
        if rest == 0:
            return path[-1]
        return (path[-1] if path else root).children.get(keys.tails[cut])

    def expect(self, node: Node, change: int) -> None:
        """Change the number of waiting requests that are about to use a node. They raise the value
        of its entries and pin nothing."""
        self._ledger.expect(node, change)

    def drop(self, suspended: Suspended, left: LeftState | None = None) -> None:
        """Return the resources of a suspended request, if it has not been evicted.

        Args:
            left: as for `close`.
        """
        if suspended.valid:
            self._suspensions.drop(suspended, left)

    # Lower tiers

    def tier_query(
        self, keys: PromptKeys, match: Match, *, limit: int, origin: Origin, least: int = 0
    ) -> TierQuery | None:
        """Describe what lower tiers could add to a fresh match: at least `min_snapshot_gain`
        blocks, from `least` up to `limit`. Returns None if nothing. Pure."""
        if not self.config.enabled:
            return None
        gain = self.config.min_snapshot_gain * self.config.block_size
        least = max(match.boundary + gain, least)
        trie, has_state = self._ledger.trie, self.config.has_state
        return make_tier_query(
            trie, match, keys, limit, least=least, has_state=has_state, origin=origin
        )

    def adopt(
        self, keys: PromptKeys, arrival: Arrival, fill: Callable[[Destinations], None]
    ) -> bool:
        """Publish content read from a lower tier, so that the next match finds it.

        `fill` copies it into the given blocks and row. Nothing is published before it returns, and
        nothing stays reserved if it raises. Returns False, without publishing, if space is short or
        if the content no longer fits what the device has.
        """
        match = self.match(keys, limit=arrival.boundary)
        if match.boundary >= arrival.boundary:
            return True
        return adopt(self._ledger, self, match, keys, arrival, fill)

    def nodes(self) -> Iterator[Node]:
        """Yield every node with its snapshot, parents before children. Read-only."""
        return self._ledger.trie.walk()

    # Gauges and upkeep

    @property
    def free_block_count(self) -> int:
        """Number of empty blocks."""
        return self._ledger.blocks.num_free

    @property
    def available_block_count(self) -> int:
        """Number of blocks that `grow` can hand out, evicting if necessary."""
        return self._ledger.blocks.num_free + self._ledger.blocks.num_reclaimable

    @property
    def version(self) -> tuple[int, ...]:
        """Unchanged as long as no match can find more content or other free space."""
        ledger, rows = self._ledger, self._ledger.rows
        return (
            ledger.version,
            ledger.additions,
            ledger.expert_bytes,
            ledger.logprobs.additions,
            self.available_block_count,
            rows.num_free,
            rows.num_live,
            len(ledger.spare_snapshots),
            len(self._suspensions),
            len(self.leases),
        )

    @property
    def usage(self) -> CacheUsage:
        """Gauges of blocks, nodes, rows and expert rows."""
        return usage(self._ledger)

    def pin(self, keys: PromptKeys, until: float, owner: bytes | None = None) -> int:
        """Keep the KV and the state of a prompt's deepest usable prefix until time `until`.

        Args:
            owner: the pin's owner; None: the prompt's root.

        Pinning a prefix again changes its expiry. Returns the tokens pinned. That is 0 if nothing
        is cached, or if pins would hold more than half of the blocks or more snapshots than the
        budget has rows.
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
        new = TimedPin(tuple(nodes), found.snapshot, until, owner or nodes[0].parent.key)
        return found.usable if self._timed_pins.add(new) else 0

    def pin_node(self, node: Node, until: float, owner: bytes | None = None) -> int:
        """Keep a node, all nodes before it and the deepest state there until time `until`. Without
        an owner, its root owns the pin.

        Returns the tokens pinned; 0 if the node was evicted, or if pins would hold too much.
        """
        if node.parent.children.get(node.key) is not node:
            return 0
        path = [node]
        while isinstance(path[-1].parent, Node):
            path.append(path[-1].parent)
        snapshot = next((each.snapshot for each in path if each.snapshot is not None), None)
        new = TimedPin(tuple(reversed(path)), snapshot, until, owner or path[-1].parent.key)
        return node.end if self._timed_pins.add(new) else 0

    @property
    def timed_pins(self) -> tuple[TimedPin, ...]:
        return self._timed_pins.pins

    def lift_pins(self, wanted: Callable[[TimedPin], bool]) -> int:
        """Release the wanted pins and return their number."""
        return self._timed_pins.lift(wanted)

    def expire(self, now: float) -> int:
        """Release the expired pins and return their number."""
        return self._timed_pins.expire(now)

    @property
    def next_expiry(self) -> float | None:
        """Time of the next expiry; None if there are no pins."""
        return self._timed_pins.next_end

    def flush(self) -> None:
        """Evict everything that no running request holds, timed pins included, and forget it."""
        self._timed_pins.clear()
        self._evictor.evict_everything()
        self._ledger.evicted_nodes.clear()
        self._ledger.evicted_snapshots.clear()

    def check(self, wanted: Callable[[], bool] = lambda: False) -> bool:
        """Recompute every invariant; AssertionError names the violated one.

        Args:
            wanted: returns True to interrupt the check, because the thread has other work; called
                often.

        Returns:
            True if the check ran to its end.
        """
        books = AuditedState(
            self._ledger, list(self.leases), self._suspensions.items(), self._timed_pins.pins
        )
        return audit(books, wanted)

    def _find(
        self, keys: PromptKeys, limit: int, *, depth: int | None = None, complete_experts: bool
    ) -> tuple[list[Node], Boundaries]:
        """Return the matched full nodes, at most `depth`, and the boundaries along them."""
        path = walk(self._ledger.trie.root(keys.root), keys, depth)
        return path, self._boundaries(path, keys, limit, complete_experts=complete_experts)

    def _boundaries(
        self, path: list[Node], keys: PromptKeys, limit: int, *, complete_experts: bool
    ) -> Boundaries:
        return find_boundaries(
            self._ledger.trie,
            path,
            keys,
            limit,
            has_state=self.config.has_state,
            complete_experts=complete_experts,
        )

    def _reason(self, keys: PromptKeys, limit: int, path: list[Node], found: Boundaries) -> str:
        ledger = self._ledger
        evidence = Evidence(
            ledger.trie, ledger.evicted_nodes, ledger.evicted_snapshots, ledger.pending
        )
        return miss_reason(evidence, keys, limit, path, found)
