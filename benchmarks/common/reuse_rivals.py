"""Rivals' prefix caches: which snapshots are made, and which one is evicted for another.

This is the one module of the benchmark that reaches into the cache. A rival is a `PrefixCache` that
makes only some kinds of snapshots, and whose `Evictor` asks a `Rule` for its victims. Everything
else is the product's: scheduler, trie, junctions, and the regular places of a fixed interval.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from vlm_serve.cache.answer_ends import AnswerEnds
from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.eviction import Evictor
from vlm_serve.cache.ledger import WORTHLESS, Ledger, is_unit
from vlm_serve.cache.prefix_cache import Match, PrefixCache
from vlm_serve.cache.records import Branch, Lease, Node, Snapshot
from vlm_serve.preprocess.identity.keys import PromptKeys


class SnapshotTree:
    """The snapshots of a cache, each below the nearest one on its path.

    Attributes:
        above: the snapshot before each one on its path; None: there is none.
        below: the snapshots next to each one, behind it; those of None are behind no other.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.above: dict[Snapshot, Snapshot | None] = {}
        self.below: dict[Snapshot | None, dict[Snapshot, None]] = {None: {}}
        ledger.events.snapshot_ready.subscribe(self._add)
        ledger.events.snapshot_evicted.subscribe(self._remove)

    def __iter__(self) -> Iterator[Snapshot]:
        """Yield the snapshots in the order of their making."""
        return iter(self.above)

    def start(self, snapshot: Snapshot) -> int:
        """Return the position from which a request starts without this snapshot."""
        above = self.above[snapshot]
        return 0 if above is None else above.position

    def path(self, snapshot: Snapshot) -> list[Snapshot]:
        """Return the path through a snapshot, shallowest first: down to the least recently used one
        wherever it parts."""
        path, here = [snapshot], self.above[snapshot]
        while here is not None:
            path.insert(0, here)
            here = self.above[here]
        while below := self.below[path[-1]]:
            path.append(min(below, key=lambda each: each.last_used))
        return path

    def _add(self, snapshot: Snapshot) -> None:
        above = snapshot.previous
        assert above is None or above in self.above, "what is before a new snapshot is there"
        behind = [each for each in self.below[above] if _leads_to(snapshot, each)]
        self.above[snapshot], self.below[snapshot] = above, dict.fromkeys(behind)
        for each in behind:
            del self.below[above][each]
            self.above[each] = snapshot
        self.below[above][snapshot] = None

    def _remove(self, snapshot: Snapshot) -> None:
        above, behind = self.above.pop(snapshot), self.below.pop(snapshot)
        del self.below[above][snapshot]
        self.below[above].update(behind)
        self.above.update(dict.fromkeys(behind, above))


def _leads_to(first: Snapshot, second: Snapshot) -> bool:
    """Return True if one snapshot's node is on the path of another one's."""
    here: Branch | None = second.node
    while isinstance(here, Node) and here.end > first.position:
        here = here.parent
    return here is first.node


class Rule(ABC):
    """Chooses the snapshot to evict. Made anew for each run."""

    @abstractmethod
    def victim(self, candidates: Sequence[Snapshot], tree: SnapshotTree) -> Snapshot:
        """Return one of the candidates, which are in the order of their making."""

    def asked(self, keys: PromptKeys, limit: int, positions: Sequence[int]) -> None:  # noqa: B027
        """Observe an admitted prompt.

        Args:
            limit: it may start from any state up to this position.
            positions: of the snapshots that it plans.
        """

    def evicted(self) -> None:  # noqa: B027
        """Observe that a victim has been evicted."""


class RivalCache(PrefixCache):
    """A prefix cache with another rule for its rows, and with some kinds of snapshots only.

    Args:
        config: as for the product's.
        rule: chooses victims.
        kinds: of snapshots that prompts make; None: all.
    """

    def __init__(
        self, config: CacheConfig, rule: Rule, kinds: frozenset[str] | None = None
    ) -> None:
        super().__init__(config)
        self.rule, self._kinds = rule, kinds
        self._evictor = RuledEvictor(self, rule)
        self.answer_ends = AnswerEnds(self.ledger, self._evictor)

    def reserve_snapshot(self, lease: Lease, position: int, kind: str) -> int | None:
        if self._kinds is not None and kind not in self._kinds:
            return None
        return super().reserve_snapshot(lease, position, kind)

    def learn(
        self,
        lease: Lease,
        match: Match,
        keys: PromptKeys,
        num_prompt_tokens: int,
        positions: Mapping[int, str],
    ) -> None:
        super().learn(lease, match, keys, num_prompt_tokens, positions)
        kept = [at for at, kind in positions.items() if self._kinds is None or kind in self._kinds]
        self.rule.asked(keys, num_prompt_tokens - 1, sorted(kept))


class RuledEvictor(Evictor):
    """Evicts what a rule names: for rows any snapshot, for blocks those at the ends of paths.

    KV that no snapshot follows goes first, and a suspended request before any snapshot, as in the
    product.
    """

    def __init__(self, cache: RivalCache, rule: Rule) -> None:
        super().__init__(cache.ledger, cache._suspensions)
        self._rule, self._tree = rule, SnapshotTree(cache.ledger)

    def make_row(self, worth: float | None = None) -> bool:
        if self._ledger.rows.num_free or (worth is None and self._suspensions.evict_oldest()):
            return True
        return self._evict([each for each in self._tree if not each.pins])

    def _free_some_block(self) -> None:
        unit = self._ledger.units.cheapest(self._ledger.unit_priority)
        if unit is not None and unit[0][0] == WORTHLESS:
            self._evict_unit(unit[1])
        elif not self._suspensions.evict_oldest():
            evicted = self._evict([each for each in self._tree if _at_leaf(each)])
            assert evicted, "reclaimable blocks without a candidate"

    def _evict(self, candidates: list[Snapshot]) -> bool:
        if candidates:
            self._ledger.remove_snapshot(self._rule.victim(candidates, self._tree))
            self._rule.evicted()
        return bool(candidates)


def _at_leaf(snapshot: Snapshot) -> bool:
    return not snapshot.pins and snapshot.node is not None and is_unit(snapshot.node.block)
