"""Policies of snapshots to compare: where they are made, and which one is evicted for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.common.reuse_marconi import FlopAware
from benchmarks.common.reuse_rivals import RivalCache, Rule, SnapshotTree
from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.cache.records import Snapshot

STATE_INTERVAL = 1024
NO_INTERVAL = 1 << 40
"""Tokens between regular snapshots that no prompt reaches."""
ENDS = frozenset({"prompt_end", "stable_end", "junction", "tier"})
"""Kinds of snapshots at a prompt's end and where prompts part, and what a lower tier gives back.
The state behind an answer is the request's own row, which every policy keeps."""


class LeastRecent(Rule):
    """Evicts the snapshot least recently made or read."""

    def victim(self, candidates: Sequence[Snapshot], tree: SnapshotTree) -> Snapshot:
        return min(candidates, key=lambda each: each.last_used)


class Thinned(LeastRecent):
    """Thins the path of the least recently used snapshot, so that what is left covers it evenly.

    The path's first and last snapshots stay. Of those between, the one goes whose neighbours are
    the closest, as in sgl-project/sglang#38000. A path without any between loses the least recently
    used snapshot.
    """

    def victim(self, candidates: Sequence[Snapshot], tree: SnapshotTree) -> Snapshot:
        oldest = super().victim(candidates, tree)
        path, free = tree.path(oldest), set(candidates)
        between = [
            (after.position - before.position, each.last_used, each.position, each)
            for before, each, after in zip(path, path[1:], path[2:], strict=False)
            if each in free
        ]
        return min(between, key=lambda each: each[:3])[-1] if between else oldest


@dataclass(frozen=True)
class Policy:
    """Where snapshots are made, and which one is evicted.

    Attributes:
        learned: regular places are learned; False: they stand at the interval.
        interval: tokens between regular snapshots, as far as they are not learned.
        rule: makes the rule for victims; None: the product's.
        kinds: of snapshots that prompts make; None: all.
    """

    learned: bool = False
    interval: int = STATE_INTERVAL
    rule: Callable[[int], Rule] | None = None
    kinds: frozenset[str] | None = None

    def cache(self, config: CacheConfig) -> PrefixCache:
        """Return an empty cache with this policy."""
        if self.rule is None:
            return PrefixCache(config)
        return RivalCache(config, self.rule(config.num_snapshot_rows), self.kinds)


DEFAULT = Policy(learned=True)
FIXED = Policy()
POLICIES = {
    "default": DEFAULT,
    "fixed": FIXED,
    "none": Policy(interval=NO_INTERVAL),
    "lru": Policy(interval=NO_INTERVAL, rule=lambda rows: LeastRecent(), kinds=ENDS),
    "thin": Policy(rule=lambda rows: Thinned()),
    "marconi": Policy(interval=NO_INTERVAL, rule=FlopAware, kinds=ENDS),
}
CLAIRVOYANT = "clairvoyant"
