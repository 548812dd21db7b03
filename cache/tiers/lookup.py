"""How much deeper a prompt could start if the lower tiers' entries were on the device."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlm_serve.cache.reasons import key_at
from vlm_serve.cache.tiers.entry import EntryId, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlm_serve.cache.matching import Match
    from vlm_serve.cache.trie import Branch, Trie
    from vlm_serve.preprocess.keys import PromptKeys

    Locate = Callable[[EntryId], str | None]


@dataclass(frozen=True, slots=True)
class Deeper:
    """What to bring up.

    Attributes:
        boundary: where the prompt could start then.
        blocks: KV of full blocks, in order, from the first one that the device lacks.
        tail: KV of the tail that ends at `boundary`, if it is needed.
        state: the snapshot at `boundary`; None for a model without state layers.
        segments: (start, end, tier) of the tokens gained. A token counts for the tier of its KV, or
            for that of the snapshot if its KV is on the device.
    """

    boundary: int
    blocks: tuple[EntryId, ...]
    tail: EntryId | None
    state: EntryId | None
    segments: tuple[tuple[int, int, str], ...]

    @property
    def needed(self) -> tuple[EntryId, ...]:
        """All of these must be read."""
        return (*self.blocks, *(each for each in (self.tail, self.state) if each is not None))

    @property
    def experts(self) -> tuple[EntryId, ...]:
        """Expert rows that may be there too."""
        kv = (*self.blocks, *([self.tail] if self.tail is not None else ()))
        return tuple(EntryId(Kind.EXPERTS, each.key) for each in kv)


def find_deeper(
    trie: Trie, match: Match, keys: PromptKeys, limit: int, *, has_state: bool, locate: Locate
) -> Deeper | None:
    """The deepest boundary <= `limit` beyond the match for which KV and state are on the device or
    below, state below. Pure."""
    size = keys.block_size
    depth = len(match.nodes)
    most = min(len(keys.block_keys), limit // size)
    while depth < most and locate(EntryId(Kind.KV, keys.block_keys[depth])) is not None:
        depth += 1
    last = bisect_right(keys.cuts, min(limit, depth * size + size - 1))
    first = bisect_right(keys.cuts, match.boundary)
    for cut in reversed(keys.cuts[first:last]):
        if keys.inside_span(cut):
            continue
        state = EntryId(Kind.STATE, key_at(keys, cut)) if has_state else None
        if state is not None and locate(state) is None:
            continue
        tail = EntryId(Kind.KV, keys.tails[cut]) if cut % size else None
        if tail is not None and _on_device(trie, match, keys, cut):
            tail = None
        if tail is not None and locate(tail) is None:
            continue
        blocks = keys.block_keys[len(match.nodes) : cut // size]
        wanted = tuple(EntryId(Kind.KV, key) for key in blocks)
        segments = _segments(match, cut, size, wanted, tail, state, locate)
        return Deeper(cut, wanted, tail, state, segments)
    return None


def _on_device(trie: Trie, match: Match, keys: PromptKeys, cut: int) -> bool:
    """Whether the KV of the part of a block that ends at `cut` is there."""
    index = cut // keys.block_size
    if index != len(match.nodes):
        return index < len(match.nodes)
    branch: Branch | None = match.nodes[index - 1] if index else trie.root(keys.root)
    return branch is not None and keys.tails[cut] in branch.children


def _segments(
    match: Match,
    boundary: int,
    size: int,
    blocks: tuple[EntryId, ...],
    tail: EntryId | None,
    state: EntryId | None,
    locate: Locate,
) -> tuple[tuple[int, int, str], ...]:
    first = len(match.nodes)
    below = {first + index: locate(entry_id) for index, entry_id in enumerate(blocks)}
    if tail is not None:
        below[boundary // size] = locate(tail)
    otherwise = (locate(state) if state is not None else None) or "device"
    segments = []
    start = match.boundary
    while start < boundary:
        end = min(boundary, start // size * size + size)
        segments.append((start, end, below.get(start // size) or otherwise))
        start = end
    return tuple(segments)
