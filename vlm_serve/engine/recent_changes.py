"""What a cache has gained, lost and found in the last minutes, in few numbers."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from vlm_serve.cache.records import Hit, Node

MAX_KEPT = 200
"""Maximum number of entries kept, each of about 300 bytes."""
SECONDS = 300.0
"""Older entries are not returned."""


@dataclass(frozen=True, slots=True)
class PastChange:
    """Changes of one kind in one batch, below one root.

    Attributes:
        time: when they were published, in monotonic seconds.
        root: root key of the nodes, or of the prompt.
        kind: see `mirror.ChangeKind`.
        num_nodes: number of nodes concerned; 0 for a hit.
        num_tokens: tokens in these nodes; 0 for a hit.
        hit: the hit, for "hit".
    """

    time: float
    root: bytes
    kind: str
    num_nodes: int = 0
    num_tokens: int = 0
    hit: Hit | None = None


class RecentChanges:
    """The latest changes; the cache's thread adds them, and any thread reads them.

    Args:
        clock: returns monotonic seconds.
        limit: maximum number of entries kept.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, limit: int = MAX_KEPT) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: deque[PastChange] = deque(maxlen=limit)

    def add(self, hits: Iterable[Hit], changed: Iterable[tuple[bytes, str, Node]]) -> None:
        """Add one batch.

        Args:
            hits: look-ups of requests.
            changed: root key, kind of change and node of each other change.
        """
        now = self._clock()
        nodes: Counter[tuple[bytes, str]] = Counter()
        tokens: Counter[tuple[bytes, str]] = Counter()
        for root, kind, node in changed:
            nodes[root, kind] += 1
            tokens[root, kind] += node.num_tokens
        with self._lock:
            self._kept.extend(PastChange(now, hit.root, "hit", hit=hit) for hit in hits)
            self._kept.extend(
                PastChange(now, root, kind, number, tokens[root, kind])
                for (root, kind), number in nodes.items()
            )

    def latest(self, roots: Container[bytes] | None = None) -> list[tuple[float, PastChange]]:
        """Return the entries with their ages in seconds, oldest first.

        Args:
            roots: return only the entries below these roots; None: all entries.
        """
        with self._lock:
            kept, now = list(self._kept), self._clock()
        aged = ((max(0.0, now - each.time), each) for each in kept)
        return [
            (age, each)
            for age, each in aged
            if age <= SECONDS and (roots is None or each.root in roots)
        ]
