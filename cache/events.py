"""What happens in the cache: told at once to whoever subscribed, and kept for whoever reads later.

Nothing here knows who listens. What a step has caused is published when the step has succeeded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from vlm_serve.cache.records import NO_MEDIA, Hit, Node, Snapshot

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Topic(Generic[_T]):
    """Events of one kind. Without subscribers publishing costs a call and nothing else."""

    __slots__ = ("failures", "subscribers")

    def __init__(self) -> None:
        self.subscribers: tuple[Callable[[_T], object], ...] = ()
        self.failures = 0

    def subscribe(self, subscriber: Callable[[_T], object]) -> None:
        self.subscribers = (*self.subscribers, subscriber)

    def unsubscribe(self, subscriber: Callable[[_T], object]) -> None:
        self.subscribers = tuple(each for each in self.subscribers if each != subscriber)

    def publish(self, event: _T) -> None:
        """Calls the subscribers in order; if one raises, that is logged and counted, no more."""
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
        snapshot_ready: the snapshot is attached to its node.
        snapshot_evicted: it is about to leave its node; its row is still intact.
        hit: the first step of a request has succeeded with what was found for it, or not found.
        block_freed, row_freed: the content is not valid any more, and nothing has reused the place.
        counted: (counter, kind) of what changes no tree; see `CacheStats`.
    """

    def __init__(self) -> None:
        self.node_added: Topic[Node] = Topic()
        self.node_evicted: Topic[Node] = Topic()
        self.snapshot_ready: Topic[Snapshot] = Topic()
        self.snapshot_evicted: Topic[Snapshot] = Topic()
        self.hit: Topic[Hit] = Topic()
        self.block_freed: Topic[int] = Topic()
        self.row_freed: Topic[int] = Topic()
        self.counted: Topic[tuple[str, str]] = Topic()

    @property
    def failures(self) -> int:
        """How often a subscriber has raised."""
        return sum(topic.failures for topic in vars(self).values())


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the log.

    Attributes:
        number: its place in the order of all entries; the first one is 1.
        kind: "node_added", "node_evicted", "snapshot_ready", "snapshot_evicted" or "hit".
        key: of the node that it is about; of a miss: empty.
        facts: what a reader needs beside that, as plain values.
    """

    number: int
    kind: str
    key: bytes
    facts: Mapping[str, Any]


class EventLog:
    """The last events by number. Written by the engine's thread, read by any.

    Args:
        events: what is kept from now on.
        limit: most events kept.

    Attributes:
        number: of the last event; 0 before the first one.
    """

    def __init__(self, events: CacheEvents, limit: int) -> None:
        self.number = 0
        self._ring = [Event(0, "", b"", {})] * limit
        events.node_added.subscribe(self._node_added)
        events.node_evicted.subscribe(lambda node: self._append("node_evicted", node.key))
        events.snapshot_ready.subscribe(self._snapshot_ready)
        events.snapshot_evicted.subscribe(
            lambda snapshot: self._append("snapshot_evicted", _node_of(snapshot).key)
        )
        events.hit.subscribe(lambda hit: self._append("hit", hit.key, asdict(hit)))

    def since(self, number: int) -> tuple[Event, ...] | None:
        """Events after `number`, oldest first; None if some of them are gone or it is not from this
        log: then the whole has to be read again."""
        last, ring = self.number, self._ring
        if not 0 <= last - number <= len(ring):
            return None
        told = tuple(ring[each % len(ring)] for each in range(number + 1, last + 1))
        # One writer, no lock: what was overwritten meanwhile has another number.
        whole = all(event.number == place for place, event in enumerate(told, number + 1))
        return told if whole else None

    def _append(self, kind: str, key: bytes, facts: Mapping[str, Any] | None = None) -> None:
        number = self.number + 1
        self._ring[number % len(self._ring)] = Event(number, kind, key, facts or {})
        self.number = number

    def _node_added(self, node: Node) -> None:
        facts = {
            "parent": node.parent.key,
            "start": node.parent.end,
            "end": node.end,
            "exact": node.exact,
            "media": node.media_offset != NO_MEDIA,
        }
        self._append("node_added", node.key, facts)

    def _snapshot_ready(self, snapshot: Snapshot) -> None:
        facts = {"snapshot": snapshot.kind, "exact": snapshot.exact}
        self._append("snapshot_ready", _node_of(snapshot).key, facts)


def _node_of(snapshot: Snapshot) -> Node:
    assert snapshot.node is not None, "only what hangs from a node is told"
    return snapshot.node
