"""How much deeper a prompt could start with the lower tiers' entries on the device."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vlm_serve.cache.matching import key_at
from vlm_serve.cache.tiers.entry import Entry, EntryId, Kind, Origin
from vlm_serve.cache.tiers.mark_records import lengths_in

if TYPE_CHECKING:
    from vlm_serve.preprocess.identity.keys import PromptKeys

Segment = tuple[int, int, str]
"""Tokens `[start, end)` and their tier."""


@dataclass(frozen=True, slots=True)
class Deeper:
    """The entries to load.

    Attributes:
        boundary: where the prompt could start then.
        blocks: KV of full blocks, in order, from the first one that the device lacks.
        tail: KV of the tail that ends at `boundary`, if it is needed.
        state: the snapshot at `boundary`; None for a model without state layers.
        segments: of the gained tokens. A token counts for the tier of its KV, or for that of the
            snapshot if its KV is on the device.
    """

    boundary: int
    blocks: tuple[EntryId, ...]
    tail: EntryId | None
    state: EntryId | None
    segments: tuple[Segment, ...]

    @property
    def needed(self) -> tuple[EntryId, ...]:
        """Entries without which nothing is gained."""
        return (
            *self.blocks,
            *(entry_id for entry_id in (self.tail, self.state) if entry_id is not None),
        )

    @property
    def experts(self) -> tuple[EntryId, ...]:
        """Expert rows that may exist too."""
        kv = (*self.blocks, *([self.tail] if self.tail is not None else ()))
        return tuple(entry_id._replace(kind=Kind.EXPERTS) for entry_id in kv)


@dataclass(frozen=True)
class TierQuery:
    """A look-up for a match in the lower tiers. It holds no reference to the cache, so any thread
    may use it while the sequence waits.

    Attributes:
        keys: of the prompt; they do not grow meanwhile.
        start: the match's boundary.
        least: the first boundary worth loading.
        limit: the last one allowed.
        depth: full blocks on the device.
        tails_above: keys of the tails behind those blocks on the device.
        has_state: False for a model without state layers.
        origin: of this engine's entries.
        told: cut points of marks that only the tiers know; the keys do not list them.
    """

    keys: PromptKeys
    start: int
    least: int
    limit: int
    depth: int
    tails_above: frozenset[bytes]
    has_state: bool
    origin: Origin
    told: tuple[int, ...] = ()

    def records(self) -> dict[EntryId, int]:
        """Map the ids of records of marks to the position where each one's tails begin."""
        size = self.keys.block_size
        starts = range(self.least // size * size, self.limit + 1, size)
        roots = (key_at(self.keys, start) if start else self.keys.root for start in starts)
        return {self.origin.id(Kind.MARKS, key): at for key, at in zip(roots, starts, strict=True)}

    def states(self) -> list[EntryId]:
        """Return the ids of the snapshots, of which one is needed."""
        return [self._state(cut) for cut in self._cuts(self.limit)] if self.has_state else []

    def kv(self) -> list[EntryId]:
        """Return the ids of KV: of blocks, and of tails."""
        keys, size = self.keys, self.keys.block_size
        blocks = keys.block_keys[self.depth : self.limit // size]
        tails = [keys.tail(cut) for cut in self._cuts(self.limit) if cut % size]
        return [self.origin.id(Kind.KV, key) for key in (*blocks, *tails)]

    def with_marks(self, records: Iterable[Entry]) -> TierQuery:
        """Return the query that considers the marks of these records too."""
        starts, size = self.records(), self.keys.block_size
        cuts = {starts[each.id] + rest for each in records for rest in lengths_in(each, size)}
        new = cuts - self.keys.tails.keys()
        return replace(self, told=tuple(cut for cut in new if self.least <= cut <= self.limit))

    def choose(self, places: Mapping[EntryId, str]) -> Deeper | None:
        """Return the deepest boundary with KV on the device or below and a state below; `places`
        maps ids to tiers."""
        keys, size = self.keys, self.keys.block_size
        depth, most = self.depth, min(len(keys.block_keys), self.limit // size)
        while depth < most and self.origin.id(Kind.KV, keys.block_keys[depth]) in places:
            depth += 1
        for cut in self._cuts(min(self.limit, depth * size + size - 1)):
            state = self._state(cut) if self.has_state else None
            if state is not None and state not in places:
                continue
            tail = None
            if cut % size and not self._on_device(cut):
                tail = self.origin.id(Kind.KV, keys.tail(cut))
                if tail not in places:
                    continue
            blocks = keys.block_keys[self.depth : cut // size]
            wanted = tuple(self.origin.id(Kind.KV, key) for key in blocks)
            if not wanted and tail is None and state is None:
                return None
            segments = tuple(self._segments(cut, wanted, tail, state, places))
            return Deeper(cut, wanted, tail, state, segments)
        return None

    def _cuts(self, last: int) -> Iterator[int]:
        """Yield the boundaries worth loading, deepest first."""
        cuts = sorted([*self.keys.cuts, *self.told]) if self.told else self.keys.cuts
        for index in range(bisect_right(cuts, last) - 1, -1, -1):
            if cuts[index] < self.least:
                return
            if not self.keys.inside_span(cuts[index]):
                yield cuts[index]

    def _state(self, cut: int) -> EntryId:
        return self.origin.id(Kind.STATE, key_at(self.keys, cut))

    def _on_device(self, cut: int) -> bool:
        """Return True if the device has the KV of the partial block that ends at `cut`."""
        index = cut // self.keys.block_size
        return index < self.depth or (
            index == self.depth and self.keys.tail(cut) in self.tails_above
        )

    def _segments(
        self,
        boundary: int,
        blocks: tuple[EntryId, ...],
        tail: EntryId | None,
        state: EntryId | None,
        places: Mapping[EntryId, str],
    ) -> Iterator[Segment]:
        size = self.keys.block_size
        below = {self.depth + index: places[entry_id] for index, entry_id in enumerate(blocks)}
        if tail is not None:
            below[boundary // size] = places[tail]
        otherwise = places[state] if state is not None else "device"
        start = self.start
        while start < boundary:
            end = min(boundary, start // size * size + size)
            yield start, end, below.get(start // size, otherwise)
            start = end
