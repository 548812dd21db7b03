"""Changes of the cache, published immediately to subscribers.

Nothing here knows the subscribers. The effects of a step are published when the step has succeeded.
`CacheStats` counts them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Generic, TypeVar

from vlm_serve.cache.records import Hit, Node, Snapshot

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Topic(Generic[_T]):
    """Events of one kind. Without subscribers, publishing costs one call."""

    __slots__ = ("failures", "subscribers")

    def __init__(self) -> None:
        self.subscribers: tuple[Callable[[_T], object], ...] = ()
        self.failures = 0

    def subscribe(self, subscriber: Callable[[_T], object]) -> None:
        self.subscribers = (*self.subscribers, subscriber)

    def unsubscribe(self, subscriber: Callable[[_T], object]) -> None:
        self.subscribers = tuple(
            listener for listener in self.subscribers if listener != subscriber
        )

    def publish(self, event: _T) -> None:
        """Call the subscribers in order; an exception is logged and counted, and the next one is
        called."""
        for subscriber in self.subscribers:
            try:
                subscriber(event)
            except Exception:
                self.failures += 1
                _log.exception("a subscriber of the cache's events raised")


class CacheEvents:
    """The topics of one cache. Subscribers run on the engine's thread and do not change the cache.

    Attributes:
        node_added: the node is in the trie.
        node_evicted: it is about to leave; its block is still intact.
        node_used: its pins, hits or size have changed.
        snapshot_ready: the snapshot is attached to its node.
        snapshot_evicted: it is about to leave its node; its row is still intact.
        hit: the first step of a request has succeeded, with or without a hit.
        block_freed, row_freed: the content is no longer valid, and the place has not been reused
            yet.
        counted: (counter, kind) of an event without effect on the tree; see `CacheStats`.
    """

    def __init__(self) -> None:
        self.node_added: Topic[Node] = Topic()
        self.node_evicted: Topic[Node] = Topic()
        self.node_used: Topic[Node] = Topic()
        self.snapshot_ready: Topic[Snapshot] = Topic()
        self.snapshot_evicted: Topic[Snapshot] = Topic()
        self.hit: Topic[Hit] = Topic()
        self.block_freed: Topic[int] = Topic()
        self.row_freed: Topic[int] = Topic()
        self.counted: Topic[tuple[str, str]] = Topic()

    @property
    def failures(self) -> int:
        """Number of exceptions that subscribers raised."""
        return sum(topic.failures for topic in vars(self).values())


@dataclass(slots=True)
class CacheStats:
    """Counts since start-up. They follow the events and only ever grow; gauges are properties of
    the cache.

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

    def _counted(self, event: tuple[str, str]) -> None:
        name, kind = event
        value = getattr(self, name)
        if isinstance(value, Counter):
            value[kind] += 1
        else:
            setattr(self, name, value + 1)

    def as_dict(self) -> dict[str, float | dict[str, int]]:
        """Return a copy made of plain numbers and dicts."""
        return {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in (
                (counter.name, getattr(self, counter.name)) for counter in fields(self)
            )
        }
