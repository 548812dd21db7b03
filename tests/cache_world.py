"""A world around the prefix cache alone: memory that holds identities, and a dict model of hits.

Where a model would leave keys and values, every KV row holds a digest of the prefix up to its
token; where it would leave a state, a row holds the digest of all tokens seen. Every step first
demands that what it reads is what its prefix needs, so that any wrong sharing shows, and freed ids
are poisoned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cache_texts import Text

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.listing import ListedNode, NodeInfo, describe
from vlm_serve.cache.logprobs import RowPiece, WantedRows, top_of
from vlm_serve.cache.matching import key_at
from vlm_serve.cache.prefix_cache import Lease, Match, PrefixCache, Suspended
from vlm_serve.cache.records import Node, Snapshot

POISON = b"poison"


@dataclass(eq=False)
class Run:
    """A request that runs. `exact_until` separates prefill from decode tokens; it `wants` the
    log-probabilities of its prompt and knows them up to token `next_row`."""

    text: Text
    lease: Lease
    exact_until: int
    capture: bool = True
    wants: WantedRows | None = None
    next_row: int = 0


@dataclass
class World:
    """The cache under test with its memory and the model of what must be found."""

    config: CacheConfig
    cache: PrefixCache = field(init=False)
    runs: list[Run] = field(default_factory=list)
    parked: list[tuple[Run, Suspended]] = field(default_factory=list)
    nodes: dict[bytes, bytes] = field(default_factory=dict)
    """Keys of the KV that must be found -> digest of the prefix."""
    snapshots: dict[bytes, bytes] = field(default_factory=dict)
    texts: dict[bytes, Text] = field(default_factory=dict)
    """Of whoever gave a node its log-probabilities."""

    def __post_init__(self) -> None:
        size = self.config.block_size
        self.kv = [[POISON] * size for _ in range(self.config.num_blocks)]
        self.rows = [POISON] * self.config.num_rows
        self.cache = PrefixCache(self.config)
        events = self.cache.events
        events.block_freed.subscribe(self.block_freed)
        events.row_freed.subscribe(self.row_freed)
        events.node_evicted.subscribe(self.node_evicted)
        events.snapshot_evicted.subscribe(self.snapshot_evicted)

    # What the cache's events say

    def block_freed(self, block: int) -> None:
        self.kv[block] = [POISON] * self.config.block_size

    def row_freed(self, row: int) -> None:
        self.rows[row] = POISON

    def node_evicted(self, node: Node) -> None:
        digest = self.nodes.pop(node.key)
        assert self.kv[node.block.id][node.num_tokens - 1] == digest, "evicted with other content"

    def snapshot_evicted(self, snapshot: Snapshot) -> None:
        assert snapshot.node is not None
        digest = self.snapshots.pop(snapshot.node.key)
        assert self.rows[snapshot.row] == digest, "evicted with other content"

    # Requests

    def match(
        self,
        text: Text,
        limit: int | None = None,
        *,
        complete: bool = False,
        wants: WantedRows | None = None,
    ) -> Match:
        """The cache's match, compared with the model's."""
        limit = len(text) - 1 if limit is None else limit
        self.cache.bring_marks(text.keys)
        match = self.cache.match(text.keys, limit=limit, complete_experts=complete, logprobs=wants)
        if wants is not None and self.config.enabled:
            limit = min(limit, self.first_missing(text, wants) - 1)
            assert match.limit == limit
            self.check_kept(text, match, wants)
        kv_tokens, kv_boundary, state_boundary = self.expected(text, limit)
        found = (match.kv_tokens, match.kv_boundary, match.state_boundary)
        assert found == (kv_tokens, kv_boundary, state_boundary), (
            f"found {found}, expected {(kv_tokens, kv_boundary, state_boundary)}"
        )
        assert match.boundary == match.state_boundary or complete
        return match

    def expected(self, text: Text, limit: int) -> tuple[int, int, int]:
        """(tokens of full blocks, KV boundary, state boundary) by trying every cut point."""
        size, keys = self.config.block_size, text.keys
        full = 0
        while full < len(keys.block_keys) and keys.block_keys[full] in self.nodes:
            full += 1
        cuts = text.cuts(0, limit)
        cuts = [
            cut
            for cut in cuts
            if cut <= full * size or (cut // size <= full and key_at(keys, cut) in self.nodes)
        ]
        ready = [cut for cut in cuts if key_at(keys, cut) in self.snapshots]
        state = ready if self.config.has_state else cuts
        return full * size, max(cuts, default=0), max(state, default=0)

    def start(
        self,
        text: Text,
        *,
        first: int | None = None,
        cold: bool = False,
        complete: bool = False,
        capture: bool = True,
        wants: WantedRows | None = None,
    ) -> Run | None:
        """Admits a request whose first slice ends at `first`; None if it was rolled back."""
        match = None if cold else self.match(text, complete=complete, wants=wants)
        before = self.fingerprint()
        lease = self.cache.open(match)
        if complete:
            assert all(piece.rows is not None for piece in self.cache.cached_experts(lease))
        if not self.cache.take_row(lease):
            self.cache.close(lease)
            assert self.fingerprint() == before, "a rolled-back match left traces"
            return None
        if not self.grow(lease, max(lease.boundary + 1, len(text) if first is None else first)):
            self.cache.close(lease)
            return None
        self.check_experts(text, lease)
        run = Run(text, lease, exact_until=len(text), capture=capture, wants=wants)
        if wants is not None:
            kept = match.logprobs if match is not None else ()
            run.next_row = kept[-1].end if kept else wants.first
            assert lease.boundary < run.next_row, "a row that nobody can compute any more"
        self.runs.append(run)
        return run

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        before = self.fingerprint()
        too_large = num_tokens > (self.config.num_blocks - 1) * self.config.block_size
        grown = self.cache.grow(lease, num_tokens)
        if not grown:
            assert self.fingerprint() == before, "growing in vain left traces"
            assert len(self.cache.leases) > 1 or too_large, "a request that runs alone does not fit"
        return grown

    def step(
        self, run: Run, end: int, snapshots: Callable[[int], bool] = lambda position: True
    ) -> bool:
        """Computes and commits tokens up to `end`; False if there is no room."""
        lease, text = run.lease, run.text
        if not self.grow(lease, end):
            return False
        wanted = [cut for cut in text.cuts(lease.length, end) if snapshots(cut)]
        rows = [(cut, self.cache.reserve_snapshot(lease, cut, "test")) for cut in wanted]
        reserved = {cut: row for cut, row in rows if row is not None}
        self.forward(run, end, reserved)
        experts = text.experts(lease.length, end) if run.capture else None
        old = lease.length
        # The model learns first: publishing never evicts.
        if self.config.enabled:
            for index in range(end // self.config.block_size):
                position = (index + 1) * self.config.block_size
                self.nodes.setdefault(text.keys.block_keys[index], text.digests[position])
            for cut, key in text.keys.tails.items():
                if old < cut <= end:
                    self.nodes.setdefault(key, text.digests[cut])
            for cut in reserved:
                self.snapshots.setdefault(key_at(text.keys, cut), text.digests[cut])
        self.cache.commit(
            lease,
            text.keys,
            end,
            exact_until=run.exact_until,
            experts=experts,
            logprobs=self._known_rows(run, end),
        )
        assert not lease.copies and lease.length == end
        return True

    def _known_rows(self, run: Run, end: int) -> RowPiece | None:
        """What a request knows of its prompt's log-probabilities after a step up to `end`."""
        wants, text = run.wants, run.text
        if wants is None:
            return None
        run.next_row = max(run.next_row, min(end + 1, run.exact_until))
        for key in (*text.keys.block_keys, *text.keys.tails.values()):
            self.texts.setdefault(key, text)
        return RowPiece(wants.first, text.logprobs(wants.first, run.next_row, wants.top))

    def serve(self, text: Text, snapshots: Callable[[int], bool] = lambda position: True) -> Match:
        """A whole request in one slice; returns what it matched."""
        match = self.match(text)
        run = self.start(text)
        assert run is not None and self.step(run, len(text), snapshots)
        self.close(run)
        self.check()
        return match

    def fail(self, run: Run, end: int) -> None:
        """A step that writes rubbish and raises: the request is closed and will start again."""
        lease = run.lease
        if self.grow(lease, end):
            for cut in run.text.cuts(lease.length, end):
                row = self.cache.reserve_snapshot(lease, cut, "test")
                if row is not None:
                    self.rows[row] = b"rubbish"
            self._copy(lease)
            first = max(lease.length, lease.shared_tokens)
            for position in range(first, end):
                self._write(lease, position, b"rubbish")
            if lease.row >= 0:
                self.rows[lease.row] = b"rubbish"
            self.cache.abandon(lease)
        self.close(run)

    def forward(self, run: Run, end: int, reserved: dict[int, int]) -> None:
        """What the model's forward does to memory, after checking all it reads."""
        lease, text = run.lease, run.text
        self._copy(lease)
        if self.config.has_state:
            state = self.rows[lease.src_row] if lease.src_row >= 0 else text.digests[0]
            assert state == text.digests[lease.length], "the state is not that of the prefix"
        for position in range(end):
            if position < max(lease.length, lease.shared_tokens):
                found = self._read(lease, position)
                assert found == text.digests[position + 1], f"wrong KV at {position}"
            else:
                self._write(lease, position, text.digests[position + 1])
        if lease.row >= 0:
            self.rows[lease.row] = text.digests[end]
        for position, row in reserved.items():
            self.rows[row] = text.digests[position]

    def close(self, run: Run) -> None:
        self.runs.remove(run)
        self.cache.close(run.lease)

    def fork(self, run: Run) -> Run | None:
        lease = self.cache.fork(run.lease)
        if lease is None:
            return None
        child = Run(run.text.fork(), lease, run.exact_until, run.capture)
        if lease.row >= 0:
            self.rows[lease.row] = self.rows[run.lease.row]
        self.runs.append(child)
        return child

    def suspend(self, run: Run) -> bool:
        self.runs.remove(run)
        suspended = self.cache.suspend(run.lease)
        if suspended is not None:
            self.parked.append((run, suspended))
        return suspended is not None

    def resume(self, index: int) -> bool:
        """Continues a suspended request exactly where it was; False if it was evicted."""
        run, suspended = self.parked.pop(index)
        lease = self.cache.resume(suspended)
        assert not suspended.valid
        if lease is None:
            return False
        assert lease is run.lease
        self.runs.append(run)
        return True

    def drop(self, index: int) -> None:
        _, suspended = self.parked.pop(index)
        self.cache.drop(suspended)
        assert not suspended.valid

    # Checks

    @property
    def has_live_slot(self) -> bool:
        """Whether one more request may hold a live row."""
        return not self.config.has_state or len(self.runs) < self.config.num_live_rows

    def check_experts(self, text: Text, lease: Lease) -> None:
        end = 0
        for piece in self.cache.cached_experts(lease):
            assert piece.start == end < piece.end <= len(text)
            end = piece.end
            if piece.rows is not None:
                assert np.array_equal(piece.rows, text.experts(piece.start, piece.end))
        assert end == lease.boundary

    def first_missing(self, text: Text, wants: WantedRows) -> int:
        """The first wanted token that no node of the prompt which contains it has a row of."""
        held = {
            node.key
            for node in self.cache.nodes()
            if node.logprobs is not None and top_of(node.logprobs) >= wants.top
        }
        size, token = self.config.block_size, wants.first
        while token < len(text) and any(
            key_at(text.keys, cut) in held
            for cut in text.keys.cuts
            if token < cut <= token // size * size + size
        ):
            token += 1
        return token

    def check_kept(self, text: Text, match: Match, wants: WantedRows) -> None:
        end = wants.first
        for piece in match.logprobs:
            assert piece.start == end < piece.end <= len(text)
            end = piece.end
            assert np.array_equal(piece.rows, text.logprobs(piece.start, end, wants.top))
        assert end == self.first_missing(text, wants)

    def check_logprobs(self) -> None:
        """Every node's rows are those of its own tokens."""
        for node in self.cache.nodes():
            if node.logprobs is not None:
                first = max(1, node.end - node.num_tokens)
                rows = self.texts[node.key].logprobs(first, node.end, top_of(node.logprobs))
                assert np.array_equal(node.logprobs, rows), "rows of another prefix"

    def fingerprint(self) -> tuple[object, object]:
        """(everything about blocks and nodes, everything about rows and counters)."""
        ledger = self.cache.ledger
        blocks = (
            sorted(ledger.blocks.free_ids),
            [(block.hard, block.soft) for block in ledger.blocks.blocks],
            [(node.key, node.pins, node.hits, node.last_used) for node in ledger.trie.walk()],
        )
        spare = sorted(snapshot.row for snapshot in ledger.spare_snapshots)
        rows = (list(ledger.rows.states), spare, dict(ledger.pending), self.cache.stats.as_dict())
        return blocks, rows

    def check(self) -> None:
        """The cache's own check, and that memory holds what the model says."""
        self.cache.check()
        self.check_logprobs()
        assert not self.cache.events.failures, "see the log: something was evicted wrongly"
        found_nodes, found_snapshots = {}, {}
        for node in self.cache.ledger.trie.walk():
            found_nodes[node.key] = self.kv[node.block.id][node.num_tokens - 1]
            if node.snapshot is not None:
                found_snapshots[node.key] = self.rows[node.snapshot.row]
        assert found_nodes == self.nodes, "the trie and the model differ"
        assert found_snapshots == self.snapshots, "the snapshots and the model differ"

    # Memory

    def _copy(self, lease: Lease) -> None:
        for source, target, count in lease.copies:
            self.kv[target][:count] = self.kv[source][:count]

    def _read(self, lease: Lease, position: int) -> bytes:
        index, offset = divmod(position, self.config.block_size)
        return self.kv[lease.blocks[index]][offset]

    def _write(self, lease: Lease, position: int, value: bytes) -> None:
        index, offset = divmod(position, self.config.block_size)
        block = self.cache.ledger.blocks[lease.blocks[index]]
        assert all(node.num_tokens <= offset for node in block.nodes), "published KV is overwritten"
        self.kv[block.id][offset] = value


def make_world(**options: Any) -> World:
    """A world with room to spare, in which `options` replace the defaults."""
    defaults: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "num_live_rows": 4,
        "num_snapshot_rows": 32,
        "min_snapshot_gain": 2,
    }
    return World(CacheConfig(**{**defaults, **options}))


def listed(world: World) -> list[NodeInfo]:
    """The nodes as readers see them."""
    entries = []
    for node in world.cache.nodes():
        kind = node.snapshot.kind if node.snapshot is not None else None
        entries.append(ListedNode(node, b"", kind))
    return [describe(world.config, entry) for entry in entries]
