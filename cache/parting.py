"""Finds a prompt's parting from known prompts, for `Places`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vlm_serve.cache.ledger import Ledger
    from vlm_serve.cache.matching import Match
    from vlm_serve.cache.places import Places
    from vlm_serve.cache.records import Lease, Node
    from vlm_serve.preprocess.keys import PromptKeys


def learn(
    ledger: Ledger,
    places: Places,
    lease: Lease,
    match: Match,
    keys: PromptKeys,
    num_prompt_tokens: int,
    positions: Mapping[int, str],
) -> None:
    """Count an admission: its parting, its misses, and its plans."""
    node = _parting_node(ledger, match, keys)
    if node is not None and node.planned is not None:
        places.parted(node.planned, match.kv_boundary)
    if match.reason == "snapshot_evicted":
        places.missed(match.kv_boundary - match.state_boundary)
    lease.planned = places.plan(match.root, lease.boundary, num_prompt_tokens, positions)
    if node is not None and positions.get(match.kv_boundary) == "junction":
        node.planned = lease.planned  # the snapshot there is this request's


def junction(ledger: Ledger, places: Places, match: Match, keys: PromptKeys) -> int:
    """Return a request's place for a snapshot by prompts parting there; 0: none."""
    if match.junction:
        return match.kv_boundary
    gain = match.kv_boundary - match.state_boundary
    if gain <= 0 or not ledger.config.has_state:
        return 0
    node = _parting_node(ledger, match, keys)
    if node is None or node.planned is None:
        return 0
    due = places.is_junction(node.planned, match.kv_boundary, gain)
    return match.kv_boundary if due else 0


def _parting_node(ledger: Ledger, match: Match, keys: PromptKeys) -> Node | None:
    """Return the node with the last common token of a prompt and the trie at a cut."""
    cut = match.kv_boundary
    depth, rest = divmod(cut, keys.block_size)
    if not cut:
        return None
    if not rest or depth < len(match.nodes):
        return match.nodes[depth if rest else depth - 1]
    parent = match.nodes[depth - 1] if depth else ledger.trie.root(keys.root)
    return None if parent is None else parent.children.get(keys.tails[cut])
