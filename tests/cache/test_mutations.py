"""Faults planted in the cache, each of which the checks must find.

A check that never fires proves nothing. Every case breaks one line of the cache the way a careless
edit would, and random traffic must then end in an assertion within a few seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cache_texts
import numpy as np
import pytest
from cache_traffic import drive

from vlm_serve.cache import eviction, ledger, logprobs, matching, prefix_cache
from vlm_serve.cache.ledger import Ledger
from vlm_serve.cache.logprobs import RowKeeper, RowPiece
from vlm_serve.cache.pools import BlockPool, RowPool, RowState
from vlm_serve.cache.records import Block, Lease, Node, Snapshot
from vlm_serve.cache.suspension import Suspensions
from vlm_serve.preprocess.identity.keys import PromptKeys

SEEDS = range(40)
STEPS = 150

Plant = Callable[[pytest.MonkeyPatch], None]


def leak_a_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "_release", lambda self, block: None)


def free_a_block_twice(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool._release

    def twice(self: BlockPool, block: Block) -> None:
        release(self, block)
        self._free.append(block.id)

    patch.setattr(BlockPool, "_release", twice)


def free_a_block_that_a_tail_still_holds(patch: pytest.MonkeyPatch) -> None:
    detach = BlockPool.detach

    def careless(self: BlockPool, block: Block, node: Node) -> None:
        rest = tuple(other for other in block.nodes if other is not node)
        detach(self, block, node)
        if rest and not block.hard:
            self._release(block)

    patch.setattr(BlockPool, "detach", careless)


def leak_a_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_cache.PrefixCache, "abandon", lambda self, lease: lease.reserved.clear())


def free_a_row_twice(patch: pytest.MonkeyPatch) -> None:
    change = RowPool.change

    def twice(self: RowPool, row: int, old: RowState, new: RowState) -> None:
        change(self, row, old, new)
        if new is RowState.FREE:
            self._free.append(row)

    patch.setattr(RowPool, "change", twice)


def keep_a_stale_snapshot(patch: pytest.MonkeyPatch) -> None:
    """Its row goes back to the pool while the node still offers it."""

    def remove(self: Ledger, snapshot: Snapshot) -> None:
        self.spare_snapshots.discard(snapshot)
        self.rows.change(snapshot.row, RowState.READY, RowState.FREE)

    patch.setattr(Ledger, "remove_snapshot", remove)


def publish_a_snapshot_at_another_node(patch: pytest.MonkeyPatch) -> None:
    attach = Ledger.attach_snapshot

    def shifted(self: Ledger, snapshot: Snapshot, node: Node) -> None:
        if isinstance(node.parent, Node) and node.parent.snapshot is None:
            snapshot.position, node = node.parent.end, node.parent
        attach(self, snapshot, node)

    patch.setattr(Ledger, "attach_snapshot", shifted)


def evict_what_is_pinned(patch: pytest.MonkeyPatch) -> None:
    def is_unit(block: Block) -> bool:
        return bool(block.nodes) and not any(node.children for node in block.nodes)

    patch.setattr(ledger, "is_unit", is_unit)


def evict_an_inner_node(patch: pytest.MonkeyPatch) -> None:
    def is_unit(block: Block) -> bool:
        return not block.hard and not block.soft and bool(block.nodes)

    patch.setattr(ledger, "is_unit", is_unit)


def release_the_restore_pin_at_once(patch: pytest.MonkeyPatch) -> None:
    take_row = prefix_cache.PrefixCache.take_row

    def careless(self: Any, lease: Lease) -> bool:
        self._release_restore(lease)
        return take_row(self, lease)

    patch.setattr(prefix_cache.PrefixCache, "take_row", careless)


def forget_the_rows_of_a_tail(patch: pytest.MonkeyPatch) -> None:
    grow = prefix_cache.PrefixCache.grow

    def careless(self: Any, lease: Lease, num_tokens: int) -> bool:
        grown = grow(self, lease, num_tokens)
        lease.copies = tuple((source, target, n - 1) for source, target, n in lease.copies)
        return grown

    patch.setattr(prefix_cache.PrefixCache, "grow", careless)


def offer_kv_without_state(patch: pytest.MonkeyPatch) -> None:
    find = matching.find_boundaries

    def eager(*args: Any, **options: Any) -> matching.Boundaries:
        return find(*args, **{**options, "has_state": False})

    patch.setattr("vlm_serve.cache.prefix_cache.find_boundaries", eager)


def hit_inside_a_span(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PromptKeys, "inside_span", lambda self, position: False)


def hash_another_medium_alike(patch: pytest.MonkeyPatch) -> None:
    """A wrong media hash: every picture has the same one in the keys."""

    class Blind(PromptKeys):
        def __init__(self, *args: Any, spans: Any, **options: Any) -> None:
            alike = [cache_texts.Span(s.start, s.end, bytes(32), s.modality) for s in spans]
            super().__init__(*args, spans=alike, **options)

    patch.setattr(cache_texts, "PromptKeys", Blind)


def resume_what_was_evicted(patch: pytest.MonkeyPatch) -> None:
    drop = Suspensions.drop

    def careless(self: Suspensions, suspended: Any) -> None:
        lease = suspended.lease
        drop(self, suspended)
        self.leases[suspended] = suspended.lease = lease

    patch.setattr(Suspensions, "drop", careless)


def miscount_what_can_be_freed(patch: pytest.MonkeyPatch) -> None:
    def make_blocks(self: eviction.Evictor, count: int) -> bool:
        blocks = self._ledger.blocks
        while blocks.num_free < count and len(self._ledger.units):
            self._free_some_block()
        return blocks.num_free >= count

    patch.setattr(eviction.Evictor, "make_blocks", make_blocks)


def keep_a_row_under_the_token_before(patch: pytest.MonkeyPatch) -> None:
    """As if a row belonged to the token that it was computed from."""
    keep: Any = logprobs.keep

    def shifted(*place: Any) -> None:
        known = place[-1]
        keep(*place[:-1], RowPiece(known.start, np.roll(known.rows, -1)))

    patch.setattr(prefix_cache, "keep", shifted)


def compute_nothing_before_a_missing_row(patch: pytest.MonkeyPatch) -> None:
    """The hit reaches the token whose row is missing: the one before it is not computed."""
    kept_rows = logprobs.kept_rows

    def eager(root: Any, path: Any, keys: Any, wanted: Any) -> Any:
        pieces = kept_rows(root, path, keys, wanted)
        last = pieces[-1] if pieces else None
        return pieces if last is None else (*pieces, RowPiece(last.end, last.rows[-1:]))

    patch.setattr("vlm_serve.cache.prefix_cache.kept_rows", eager)


def let_rows_grow_without_a_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowKeeper, "_make_room", lambda self, size: True)


def lose_count_of_dropped_rows(patch: pytest.MonkeyPatch) -> None:
    def drop(self: RowKeeper, node: Node) -> None:
        node.logprobs = None
        self.refresh(node)

    patch.setattr(RowKeeper, "drop", drop)


PLANTS: list[Plant] = [
    leak_a_block,
    free_a_block_twice,
    free_a_block_that_a_tail_still_holds,
    leak_a_row,
    free_a_row_twice,
    keep_a_stale_snapshot,
    publish_a_snapshot_at_another_node,
    evict_what_is_pinned,
    evict_an_inner_node,
    release_the_restore_pin_at_once,
    forget_the_rows_of_a_tail,
    offer_kv_without_state,
    hit_inside_a_span,
    hash_another_medium_alike,
    resume_what_was_evicted,
    miscount_what_can_be_freed,
    keep_a_row_under_the_token_before,
    compute_nothing_before_a_missing_row,
    let_rows_grow_without_a_bound,
    lose_count_of_dropped_rows,
]


@pytest.mark.always
def test_without_a_fault_the_traffic_is_clean() -> None:
    for seed in SEEDS:
        drive(seed, STEPS)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in SEEDS:
            drive(seed, STEPS)
