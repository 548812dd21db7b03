"""Content from a lower tier: it is given blocks and a row, then published like computed content."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vlm_serve.cache.publishing import Publisher
from vlm_serve.cache.reasons import key_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vlm_serve.cache.leasing import Leasing
    from vlm_serve.cache.ledger import Ledger
    from vlm_serve.cache.matching import Match
    from vlm_serve.cache.records import Lease, Rows
    from vlm_serve.preprocess.identity.keys import PromptKeys


@dataclass(frozen=True)
class Arrival:
    """The content read for one prompt.

    Attributes:
        boundary: position up to which the prompt will be covered.
        kv: keys of nodes whose KV was read.
        state: whether the snapshot at `boundary` was read.
        exact_until: everything before this position was computed by prefill alone.
        experts: expert rows by node key.
    """

    boundary: int
    kv: frozenset[bytes]
    state: bool
    exact_until: int
    experts: Mapping[bytes, Rows] = field(default_factory=dict)


@dataclass(frozen=True)
class Destinations:
    """The destinations: node key -> block, and the row of the snapshot or -1."""

    blocks: Mapping[bytes, int]
    row: int


def adopt(
    ledger: Ledger,
    leasing: Leasing,
    match: Match,
    keys: PromptKeys,
    arrival: Arrival,
    fill: Callable[[Destinations], None],
) -> bool:
    """Implement `PrefixCache.adopt`; `match` is fresh and ends before the boundary."""
    lease = leasing.open(match)
    try:
        places = _reserve(ledger, leasing, lease, keys, arrival)
        if places is None:
            return False
        fill(places)
        ledger.tick()
        publisher = Publisher(ledger, lease, keys, arrival.boundary, arrival.exact_until)
        publisher.publish_loaded()
        _give_experts(ledger, lease, keys, arrival)
    finally:
        leasing.close(lease)
    return True


def _reserve(
    ledger: Ledger, leasing: Leasing, lease: Lease, keys: PromptKeys, arrival: Arrival
) -> Destinations | None:
    """Reserve blocks and a row for the part that the device lacks; return None if something is
    missing."""
    config, boundary = ledger.config, arrival.boundary
    full, rest = divmod(boundary, config.block_size)
    present = len(lease.path)
    wanted = {keys.block_keys[index]: index for index in range(present, full)}
    if rest and full >= present and not _has_tail(ledger, lease, keys, boundary):
        wanted[key_at(keys, boundary)] = full
    if not arrival.kv.issuperset(wanted) or (config.has_state and not arrival.state):
        return None
    count = max(wanted.values()) + 1 - present if wanted else 0
    if count > ledger.blocks.num_free + ledger.blocks.num_reclaimable:
        return None
    if count and not leasing.grow(lease, (present + count) * config.block_size):
        return None
    row = -1
    if config.has_state:
        reserved = leasing.reserve_snapshot(lease, boundary, "tier")
        if reserved is None:
            return None
        row = reserved
    # Reserving may have evicted the tail on which the boundary depends.
    on_device = rest and full >= present and key_at(keys, boundary) not in wanted
    if on_device and not _has_tail(ledger, lease, keys, boundary):
        return None
    return Destinations({key: lease.blocks[index] for key, index in wanted.items()}, row)


def _has_tail(ledger: Ledger, lease: Lease, keys: PromptKeys, boundary: int) -> bool:
    """Return True if the tail that ends at `boundary` is a child of the lease's last node."""
    index = boundary // keys.block_size
    if index != len(lease.path):
        return False
    branch = lease.path[-1] if index else ledger.trie.root(keys.root)
    return branch is not None and keys.tails[boundary] in branch.children


def _give_experts(ledger: Ledger, lease: Lease, keys: PromptKeys, arrival: Arrival) -> None:
    nodes = list(lease.path)
    if arrival.boundary % keys.block_size:
        index = arrival.boundary // keys.block_size
        branch = lease.path[index - 1] if index else ledger.trie.root(keys.root)
        assert branch is not None
        nodes.append(branch.children[keys.tails[arrival.boundary]])
    for node in nodes:
        rows = arrival.experts.get(node.key)
        if rows is not None and node.experts is None and len(rows) == node.num_tokens:
            node.experts = rows
            ledger.expert_bytes += rows.nbytes
            ledger.used(node)
