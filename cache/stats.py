"""Counters of the prefix cache. They follow its events and only ever grow; gauges are properties of
the cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlm_serve.cache.events import CacheEvents
    from vlm_serve.cache.records import Hit, Node, Snapshot


@dataclass(slots=True)
class CacheStats:
    """Counts since start-up.

    Attributes:
        requests: those whose first step has succeeded; replays after preemption are counted
            separately.
        query_tokens, hit_tokens: prompt tokens of those requests, and those served by the cache.
        joined_requests, joined_tokens, joined_ms: of those that waited while others computed tokens
            of theirs: their number, these tokens, the time.
        replays: recorded admissions that resumed preempted work.
        reasons: admissions by match reason.
        saves: snapshots published, by kind.
        skips: snapshots not taken for lack of a row, by kind.
        duplicates: snapshots returned because the node already had one.
        evictions: by kind: "kv" and "tail" nodes, "snapshot", "suspended".
        stolen: pinned snapshots taken over by their only reader as its live row.
    """

    requests: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    joined_requests: int = 0
    joined_tokens: int = 0
    joined_ms: float = 0.0
    replays: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    saves: Counter[str] = field(default_factory=Counter)
    skips: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    evictions: Counter[str] = field(default_factory=Counter)
    stolen: int = 0

    def listen(self, events: CacheEvents, block_size: int) -> None:
        """Start counting."""

        def node_evicted(node: Node) -> None:
            self.evictions["kv" if node.num_tokens == block_size else "tail"] += 1

        events.node_evicted.subscribe(node_evicted)
        events.hit.subscribe(self._hit)
        events.snapshot_ready.subscribe(self._snapshot_ready)
        events.counted.subscribe(self._counted)

    def _hit(self, hit: Hit) -> None:
        self.requests += 1
        self.query_tokens += hit.prompt_tokens
        self.hit_tokens += hit.boundary
        self.joined_requests += hit.joined_tokens > 0
        self.joined_tokens += hit.joined_tokens
        self.joined_ms += hit.joined_ms
        self.reasons[hit.reason] += 1

    def _snapshot_ready(self, snapshot: Snapshot) -> None:
        self.saves[snapshot.kind] += 1

    def _counted(self, what: tuple[str, str]) -> None:
        name, kind = what
        value = getattr(self, name)
        if isinstance(value, Counter):
            value[kind] += 1
        else:
            setattr(self, name, value + 1)

    def as_dict(self) -> dict[str, float | dict[str, int]]:
        """Return a copy made of plain numbers and dicts."""
        return {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in ((each.name, getattr(self, each.name)) for each in fields(self))
        }
