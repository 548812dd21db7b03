"""The joint match: the deepest boundary that has both KV and state, and why it is not deeper; and
where two prompts part.

docs/architecture.md#cut-points-and-matching, docs/architecture.md#reasons
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vlm_serve.cache.records import NO_MEDIA, MediaStart

if TYPE_CHECKING:
    from vlm_serve.cache.ledger import Ledger
    from vlm_serve.cache.logprobs import RowPiece
    from vlm_serve.cache.records import Node, Snapshot
    from vlm_serve.cache.trie import Trie
    from vlm_serve.preprocess.identity.keys import PromptKeys


@dataclass(frozen=True, slots=True)
class Match:
    """The cached part of a prompt. It only describes: it pins nothing and is stale after the next
    eviction.

    Attributes:
        boundary: deepest usable position; 0: none.
        kv_boundary: deepest allowed cut point <= limit covered by KV, tails included.
        kv_tokens: tokens of the matched full blocks. May exceed `boundary` and end inside a span.
        state_boundary: deepest allowed cut point <= limit with KV and a snapshot; for a model
            without state layers `kv_boundary`.
        snapshot: the one at `boundary`.
        exact: everything matched was computed by prefill.
        reason: why the boundary is not deeper; "full" if it cannot be.
        blocks: physical ids of the matched full blocks.
        junction: KV is so much deeper than state that a snapshot at `kv_boundary` pays.
        limit: the deepest boundary that was allowed.
        logprobs: the stored ones of the requested prompt log-probabilities, without a hole.
        root: key of the prompt's root.
        answered: number of tokens up to `boundary` that the model generated.
    """

    boundary: int = 0
    kv_boundary: int = 0
    kv_tokens: int = 0
    state_boundary: int = 0
    snapshot: Snapshot | None = field(default=None, repr=False)
    exact: bool = True
    reason: str = "cold"
    blocks: tuple[int, ...] = ()
    junction: bool = False
    limit: int = 0
    logprobs: tuple[RowPiece, ...] = field(default=(), repr=False)
    nodes: tuple[Node, ...] = field(default=(), repr=False)
    tail: Node | None = field(default=None, repr=False)
    """The tail that ends at `boundary`, if a tail does."""
    pending_key: bytes | None = field(default=None, repr=False)
    """Key of the first full block that is missing."""
    version: int = 0
    """Version of the trie; a removal makes the match stale."""
    root: bytes = field(default=b"", repr=False)
    answered: int = 0


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Boundaries along a matched path; `tail` is the tail node at `usable`, if there is one."""

    kv: int = 0
    state: int = 0
    usable: int = 0
    tail: Node | None = None
    snapshot: Snapshot | None = None


def find_boundaries(
    trie: Trie,
    path: list[Node],
    keys: PromptKeys,
    limit: int,
    *,
    has_state: bool,
    complete_experts: bool,
) -> Boundaries:
    """Search from the deepest candidate down, at cut points outside spans only."""
    block_size = trie.block_size
    covered = len(path) * block_size
    root = trie.root(keys.root)
    with_experts = _leading_experts(path) if complete_experts else len(path) + 1
    kv = state = 0
    deepest = bisect_right(keys.cuts, min(limit, covered + block_size - 1))
    for index in range(deepest - 1, -1, -1):
        cut = keys.cuts[index]
        depth, rest = divmod(cut, block_size)
        node: Node | None
        if rest == 0:
            node = path[depth - 1]
        else:
            branch = path[depth - 1] if depth else root
            node = branch.children.get(keys.tails[cut]) if branch is not None else None
            if node is None and cut > covered:
                continue
        snapshot = node.snapshot if node is not None else None
        hit = snapshot is not None or not has_state
        if (kv and not hit) or keys.inside_span(cut):
            continue
        kv = kv or cut
        if not hit:
            continue
        state = state or cut
        if _has_experts(depth, rest, node, with_experts):
            return Boundaries(kv, state, cut, node if rest else None, snapshot)
    return Boundaries(kv, state)


def _leading_experts(path: list[Node]) -> int:
    """Count the nodes from the root on that hold expert rows without a gap."""
    for index, node in enumerate(path):
        if node.experts is None:
            return index
    return len(path)


def _has_experts(depth: int, rest: int, node: Node | None, with_experts: int) -> bool:
    """Return True if rows are complete up to the cut after `depth` blocks and `rest` tokens."""
    if depth > with_experts:
        return False
    in_tail = node is not None and node.experts is not None
    return rest == 0 or depth < with_experts or in_tail


def shared_cut(keys: PromptKeys, other: PromptKeys, *, least: int, limit: int) -> int:
    """Return the deepest cut point in `[least, limit]`, outside of media spans, before which two
    prompts are the same; 0 if there is none.

    A cut point depends only on the tokens before it, so it is one of both prompts. Marks of the
    other prompt are after `PromptKeys.bring_from`; others are only where both have them.

    Args:
        keys: of the prompt whose boundary is wanted.
        other: keys of the prompt that is computed.
        least: at least 1.
        limit: the deepest position that is allowed.
    """
    assert least > 0 and keys.block_size == other.block_size
    mine, theirs, size = keys.block_keys, other.block_keys, keys.block_size
    most = min(len(mine), len(theirs))
    first = least // size
    # Keys are chained: equal keys mean equal prefixes, so one comparison refuses most prompts.
    if first > most or (first and mine[first - 1] != theirs[first - 1]):
        return 0
    full = bisect_left(range(first, most), True, key=lambda index: mine[index] != theirs[index])
    full += first
    last = bisect_right(keys.cuts, min(limit, full * size + size - 1))
    for index in range(last - 1, -1, -1):
        cut = keys.cuts[index]
        if cut < least:
            break
        equal = cut % size == 0 or other.tails.get(cut) == keys.tails[cut]
        if equal and not keys.inside_span(cut):
            return cut
    return 0


def media_offset(keys: PromptKeys, start: int, end: int) -> int:
    """Return the offset of the first media span that starts in `[start, end)`, or NO_MEDIA."""
    index = bisect_left(keys.span_bounds, (start, 0))
    if index == len(keys.span_bounds) or keys.span_bounds[index][0] >= end:
        return NO_MEDIA
    return keys.span_bounds[index][0] - start


def media_starts(keys: PromptKeys, start: int, end: int) -> tuple[MediaStart, ...]:
    """Return the media spans that start in `[start, end)`, relative to `start`."""
    first = bisect_left(keys.span_bounds, (start, 0))
    last = bisect_left(keys.span_bounds, (end, 0))
    return tuple(
        MediaStart(bounds[0] - start, bounds[1] - bounds[0], kind, content_hash)
        for bounds, kind, content_hash in zip(
            keys.span_bounds[first:last],
            keys.span_kinds[first:last],
            keys.span_hashes[first:last],
            strict=True,
        )
    )


def key_at(keys: PromptKeys, cut: int) -> bytes:
    """Return the key of the node that ends at a cut point."""
    depth, rest = divmod(cut, keys.block_size)
    return keys.tail(cut) if rest else keys.block_keys[depth - 1]


def miss_reason(
    ledger: Ledger, keys: PromptKeys, limit: int, path: list[Node], bounds: Boundaries
) -> str:
    """Return one word for a match that found these boundaries."""
    possible = keys.last_cut(len(keys) - 1)
    if possible == 0:
        return "below_granularity"
    if bounds.usable == possible:
        return "full"
    if bounds.usable < bounds.state:
        return "experts_missing"
    if bounds.state < bounds.kv:
        return _state_reason(ledger, keys, bounds)
    return _kv_reason(ledger, keys, limit, path, bounds)


def _state_reason(ledger: Ledger, keys: PromptKeys, bounds: Boundaries) -> str:
    """Return the reason for a match with KV beyond its state."""
    first = bisect_right(keys.cuts, bounds.state)
    last = bisect_right(keys.cuts, bounds.kv)
    evicted = ledger.evicted_snapshots
    if len(evicted) and any(key_at(keys, cut) in evicted for cut in keys.cuts[first:last]):
        return "snapshot_evicted"
    return "no_snapshot"


def _kv_reason(
    ledger: Ledger, keys: PromptKeys, limit: int, path: list[Node], bounds: Boundaries
) -> str:
    """Return the reason for a match whose KV ends where its state does."""
    block_size = keys.block_size
    start = len(path) * block_size
    end = min(start + block_size, len(keys))
    missing = [keys.tails[cut] for cut in _cuts_between(keys, start, end) if cut in keys.tails]
    if len(path) < len(keys.block_keys):
        missing.append(keys.block_keys[len(path)])
    if any(key in ledger.evicted_nodes for key in missing):
        return "kv_evicted"
    if any(key in ledger.pending for key in missing):
        return "in_flight"
    deepest = bisect_right(keys.cuts, min(limit, start))
    if deepest and keys.cuts[deepest - 1] > bounds.kv:
        return "span_clamp"
    parent = path[-1].key if path else keys.root
    if _in_a_video(keys, bounds.kv):
        return "media_grown"
    offset = media_offset(keys, start, end)
    differs = media_offset(keys, max(start, bounds.kv), end) != NO_MEDIA
    if differs and (parent, offset) in ledger.trie.media_starts:
        return "media_changed"
    if not path and ledger.trie.roots and keys.root not in ledger.trie.roots:
        return "salt"
    return "unseen" if bounds.usable else "cold"


def _in_a_video(keys: PromptKeys, boundary: int) -> bool:
    """Return True if the next token continues a video whose earlier part is fully cached."""
    index = bisect_left(keys.span_bounds, (boundary, 0))
    if index == len(keys.span_bounds) or not keys.span_continues[index]:
        return False
    return index > 0 and keys.span_bounds[index - 1][1] <= boundary


def _cuts_between(keys: PromptKeys, start: int, end: int) -> list[int]:
    """Return the cut points in `(start, end]`."""
    return keys.cuts[bisect_right(keys.cuts, start) : bisect_right(keys.cuts, end)]
