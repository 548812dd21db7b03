"""Changes of the cache, published immediately to subscribers.

Nothing here knows the subscribers. The effects of a step are published when the step has succeeded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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
        self.subscribers = tuple(each for each in self.subscribers if each != subscriber)

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
