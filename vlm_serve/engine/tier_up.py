"""What a waiting request could reuse from a lower tier comes up before it is admitted."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from vlm_serve.cache.adopting import Arrival, Places
from vlm_serve.cache.experts import Rows
from vlm_serve.cache.prefix_cache import Match, PrefixCache
from vlm_serve.cache.tiers.entry import Entry, EntryId, Kind
from vlm_serve.cache.tiers.lookup import Deeper
from vlm_serve.cache.tiers.stack import TierStack
from vlm_serve.engine.sequence import Fetched, Sequence
from vlm_serve.engine.tier_transfer import Staged, Transfer, expert_rows
from vlm_serve.preprocess.keys import PromptKeys

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Fetch:
    """Entries on their way up, and the sequences that wait for them."""

    keys: PromptKeys
    deeper: Deeper
    generation: int
    waiters: list[Sequence] = field(default_factory=list)


@dataclass(frozen=True)
class Reading:
    """What was read for a fetch: all that it needs, and the expert rows there are."""

    entries: dict[EntryId, Entry]
    staged: dict[EntryId, Staged]
    experts: dict[bytes, Rows]


class TierFetcher:
    """Decides what comes up and takes it in. All but `read` on the engine's thread.

    Attributes:
        starting: fetches that nobody has begun to read.
    """

    def __init__(self, cache: PrefixCache, stack: TierStack, transfer: Transfer) -> None:
        self.starting: list[Fetch] = []
        self._cache = cache
        self._stack = stack
        self._transfer = transfer
        self._under_way: dict[EntryId, Fetch] = {}
        self._generation = 0

    @property
    def busy(self) -> bool:
        """Sequences wait for entries."""
        return bool(self._under_way)

    def deeper(self, keys: PromptKeys, match: Match, limit: int) -> Deeper | None:
        """What lower tiers could add to a match. Changes nothing."""
        if match.reason == "experts_missing":
            return None
        return self._cache.deeper(keys, match, limit=limit, locate=self._stack.locate)

    def ask(self, sequence: Sequence, match: Match) -> bool:
        """True if the sequence is to wait because lower tiers have much more of its prompt."""
        if sequence.fetched is not None:
            return False
        deeper = self.deeper(sequence.keys, match, sequence.num_tokens - 1)
        if deeper is None or not deeper.needed:
            return False
        fetch = self._under_way.get(deeper.needed[-1])
        if fetch is None:
            fetch = Fetch(sequence.keys, deeper, self._generation)
            self._under_way[deeper.needed[-1]] = fetch
            self.starting.append(fetch)
        fetch.waiters.append(sequence)
        sequence.fetching = True
        return True

    def read(self, fetch: Fetch) -> Reading | None:
        """Reads and verifies the entries; None if one of them is gone or bad. Any thread."""
        entries: dict[EntryId, Entry] = {}
        staged: dict[EntryId, Staged] = {}
        for entry_id in fetch.deeper.needed:
            found = self._stack.get(entry_id)
            ready = self._transfer.stage(found.entry) if found is not None else None
            if found is None or ready is None:
                if found is not None:
                    self._stack.discard_bad(entry_id)
                return None
            entries[entry_id], staged[entry_id] = found.entry, ready
        experts: dict[bytes, Rows] = {}
        for entry_id in fetch.deeper.experts:
            found = self._stack.get(entry_id)
            rows = expert_rows(found.entry) if found is not None else None
            if rows is not None:
                experts[entry_id.key] = rows
        return Reading(entries, staged, experts)

    def finish(self, fetch: Fetch, reading: Reading | None) -> None:
        """Takes in what was read (None: reading failed) and lets the waiting sequences go on."""
        del self._under_way[fetch.deeper.needed[-1]]
        adopted = False
        if reading is not None and fetch.generation == self._generation:
            try:
                adopted = self._adopt(fetch, reading)
            except Exception:
                reading = None
                _log.exception("entries of a lower tier could not be taken in")
        if reading is None:
            self._stack.counts["failed"] += 1
        segments = fetch.deeper.segments if adopted else ()
        for sequence in fetch.waiters:
            sequence.fetching = False
            sequence.fetched = Fetched(segments, failed=reading is None)

    def forget(self) -> None:
        """The cache is flushed: what is on its way is not taken in."""
        self._generation += 1

    def _adopt(self, fetch: Fetch, reading: Reading) -> bool:
        deeper = fetch.deeper
        staged = {
            entry_id.key: each for entry_id, each in reading.staged.items() if _is_kv(entry_id)
        }

        def fill(places: Places) -> None:
            for key, block in places.blocks.items():
                self._transfer.write_kv(block, staged[key])
            if places.row >= 0:
                assert deeper.state is not None
                self._transfer.write_state(places.row, reading.staged[deeper.state])

        arrival = Arrival(
            boundary=deeper.boundary,
            kv=frozenset(staged),
            state=deeper.state is not None,
            exact_until=_exact_until(deeper, reading, self._cache.config.block_size),
            experts=reading.experts,
        )
        return self._cache.adopt(fetch.keys, arrival, fill)


def _is_kv(entry_id: EntryId) -> bool:
    return entry_id.kind is Kind.KV


def _exact_until(deeper: Deeper, reading: Reading, block_size: int) -> int:
    """Everything up to there was made by prefill alone."""
    first = deeper.boundary // block_size - len(deeper.blocks)
    for index, entry_id in enumerate(deeper.blocks):
        if not reading.entries[entry_id].exact:
            return (first + index) * block_size
    ends = [each for each in (deeper.tail, deeper.state) if each is not None]
    exact = all(reading.entries[entry_id].exact for entry_id in ends)
    return deeper.boundary if exact else deeper.boundary - 1
