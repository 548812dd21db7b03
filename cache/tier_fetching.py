"""Loads a waiting request's reusable content from a lower tier before the request is admitted.

The content is given blocks and a row, then published like computed content.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlm_serve.cache.matching import Match, key_at
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.cache.publishing import Publisher
from vlm_serve.cache.records import Lease, Rows
from vlm_serve.cache.tiers.entry import Entry, EntryId, Kind
from vlm_serve.cache.tiers.lookup import Deeper, Segment, TierQuery
from vlm_serve.cache.tiers.stack import TierStack
from vlm_serve.cache.tiers.store_calls import WaitBudget
from vlm_serve.cache.tiers.transfer import Transfer, expert_rows

if TYPE_CHECKING:
    from vlm_serve.cache.ledger import Ledger
    from vlm_serve.preprocess.identity.keys import PromptKeys

_log = logging.getLogger(__name__)

Arrived = Callable[[tuple[Segment, ...], bool], None]
"""Called with the loaded segments, and whether an existing entry could not be read or published."""


@dataclass(frozen=True)
class Fetch:
    """A sequence that waits for the tiers."""

    query: TierQuery
    generation: int
    arrived: Arrived
    patience: WaitBudget


@dataclass(frozen=True)
class TierReading:
    """The result of a read. `deeper`: what the tiers have; None: nothing useful. `arrival`: its
    content; None if it is gone or bad."""

    deeper: Deeper | None = None
    arrival: Arrival | None = None


class TierFetcher:
    """Decides what to load and publishes it. Coroutines run on the stack's thread, which alone
    calls the stores; everything else runs on the engine's.

    Attributes:
        starting: fetches that have not been started yet.
    """

    def __init__(self, cache: PrefixCache, stack: TierStack, transfer: Transfer) -> None:
        self.starting: list[Fetch] = []
        self._cache = cache
        self._stack = stack
        self._transfer = transfer
        self._num_waiting = 0
        self._generation = 0
        self._under_way: dict[EntryId, asyncio.Task[TierReading]] = {}

    @property
    def busy(self) -> bool:
        """True while sequences wait for entries."""
        return self._num_waiting > 0

    def ask(
        self,
        keys: PromptKeys,
        match: Match,
        limit: int,
        arrived: Arrived,
        patience: WaitBudget | None = None,
        *,
        least: int = 0,
    ) -> bool:
        """Return True if the tiers should be read for more of a prompt than the match has, from
        `least` up to `limit`. The sequence then waits until `arrived` is called, and the wait is
        added to its patience."""
        query = self._query(keys, match, limit, least)
        if query is None:
            return False
        self.starting.append(Fetch(query, self._generation, arrived, patience or WaitBudget()))
        self._num_waiting += 1
        return True

    def look_up(self, keys: PromptKeys, match: Match, limit: int) -> Future[Deeper | None] | None:
        """Look up what the tiers could add to a match. Changes nothing; never wait for the
        result on the engine's thread."""
        query = self._query(keys, match, limit)
        return self._stack.submit(self._choose(query)) if query is not None else None

    def finish(self, fetch: Fetch, reading: TierReading | None) -> None:
        """Publish what was read (None: reading raised) and let the waiting sequence continue."""
        self._num_waiting -= 1
        deeper, arrival = (reading.deeper, reading.arrival) if reading is not None else (None, None)
        failed = arrival is None and (reading is None or deeper is not None)
        adopted = False
        if arrival is not None and fetch.generation == self._generation:
            try:
                fetch.query.keys.bring([arrival.boundary])
                adopted = self._adopt(fetch.query.keys, arrival)
            except Exception:
                failed = True
                _log.exception("entries of a lower tier could not be taken in")
        self._stack.counts["failed"] += failed
        fetch.arrived(deeper.segments if deeper is not None and adopted else (), failed)

    def forget(self) -> None:
        """Discard pending reads after a flush."""
        self._generation += 1

    async def read(self, fetch: Fetch) -> TierReading:
        """Look up, choose and read. Sequences that wait for the same entries share one read."""
        loop, patience = asyncio.get_running_loop(), fetch.patience
        since = loop.time() - patience.spent
        try:
            return await self._look_and_read(fetch.query, since)
        finally:
            patience.spent = loop.time() - since

    async def _look_and_read(self, query: TierQuery, since: float) -> TierReading:
        deeper = await self._choose(query, since)
        if deeper is None:
            return TierReading()
        last = deeper.needed[-1]
        task = self._under_way.get(last)
        if task is None:
            task = self._under_way[last] = asyncio.create_task(self._read(deeper, since))
            task.add_done_callback(lambda _: self._under_way.pop(last))
        return await task

    def _query(
        self, keys: PromptKeys, match: Match, limit: int, least: int = 0
    ) -> TierQuery | None:
        if match.reason == "experts_missing":
            return None
        return self._cache.tier_query(
            keys, match, limit=limit, origin=self._stack.origin, least=least
        )

    async def _choose(self, query: TierQuery, since: float | None = None) -> Deeper | None:
        """Look up snapshots and records of marks first; without any, look up nothing else."""
        stack, states = self._stack, query.states()
        first = states if query.has_state else query.kv()
        places = await stack.locate([*query.records(), *first], since)
        records = [entry_id for entry_id in places if entry_id.kind is Kind.MARKS]
        if records:
            query = query.with_marks((await stack.get(records, since)).values())
        rest = {*query.states(), *query.kv()} - {*first}
        if rest and (query.told or len(places) > len(records)):
            places |= await stack.locate(rest, since)
        return query.choose(places)

    async def _read(self, deeper: Deeper, since: float) -> TierReading:
        needed = deeper.needed
        entries = await self._stack.get((*needed, *deeper.experts), since)
        if any(entry_id not in entries for entry_id in needed):
            return TierReading(deeper)
        staged = {entry_id: self._transfer.stage(entries[entry_id]) for entry_id in needed}
        foreign = [entry_id for entry_id, content in staged.items() if content is None]
        if foreign:
            await self._stack.discard_bad(foreign)
            return TierReading(deeper)
        rows = {
            entry_id.key: expert_rows(entries[entry_id])
            for entry_id in deeper.experts
            if entry_id in entries
        }
        arrival = Arrival(
            boundary=deeper.boundary,
            kv={entry_id.key: staged[entry_id] for entry_id in needed if entry_id.kind is Kind.KV},
            state=staged[deeper.state] if deeper.state is not None else None,
            exact_until=_exact_until(deeper, entries, self._cache.config.block_size),
            experts={key: expert_ids for key, expert_ids in rows.items() if expert_ids is not None},
        )
        return TierReading(deeper, arrival)

    def _adopt(self, keys: PromptKeys, arrival: Arrival) -> bool:
        def fill(places: Destinations) -> None:
            for key, block in places.blocks.items():
                self._transfer.write_kv(block, arrival.kv[key])
            if places.row >= 0:
                self._transfer.write_state(places.row, arrival.state)

        return adopt(self._cache, keys, arrival, fill)


def _exact_until(deeper: Deeper, entries: dict[EntryId, Entry], block_size: int) -> int:
    """Return the position up to which everything was computed by prefill alone."""
    first = deeper.boundary // block_size - len(deeper.blocks)
    for index, entry_id in enumerate(deeper.blocks):
        if not entries[entry_id].exact:
            return (first + index) * block_size
    ends = [entry_id for entry_id in (deeper.tail, deeper.state) if entry_id is not None]
    exact = all(entries[entry_id].exact for entry_id in ends)
    return deeper.boundary if exact else deeper.boundary - 1


@dataclass(frozen=True)
class Arrival:
    """The content read for one prompt.

    Attributes:
        boundary: position up to which the prompt will be covered.
        kv: staged KV by node key.
        state: the staged snapshot at `boundary`; None if it was not read.
        exact_until: everything before this position was computed by prefill alone.
        experts: expert rows by node key.
    """

    boundary: int
    kv: Mapping[bytes, Any]
    state: Any | None
    exact_until: int
    experts: Mapping[bytes, Rows] = field(default_factory=dict)


@dataclass(frozen=True)
class Destinations:
    """The destinations: node key -> block, and the row of the snapshot or -1."""

    blocks: Mapping[bytes, int]
    row: int


def adopt(
    cache: PrefixCache,
    keys: PromptKeys,
    arrival: Arrival,
    fill: Callable[[Destinations], None],
) -> bool:
    """Publish content read from a lower tier, so that the next match finds it.

    `fill` copies it into the given blocks and row. Nothing is published before it returns, and
    nothing stays reserved if it raises. Returns False, without publishing, if space is short or
    if the content no longer fits what the device has.
    """
    match, ledger = cache.match(keys, limit=arrival.boundary), cache.ledger
    if match.boundary >= arrival.boundary:
        return True
    lease = cache.open(match)
    try:
        places = _reserve(cache, lease, keys, arrival)
        if places is None:
            return False
        fill(places)
        ledger.tick()
        publisher = Publisher(ledger, lease, keys, arrival.boundary, arrival.exact_until)
        publisher.publish_loaded()
        _give_experts(ledger, lease, keys, arrival)
    finally:
        cache.close(lease)
    return True


def _reserve(
    cache: PrefixCache, lease: Lease, keys: PromptKeys, arrival: Arrival
) -> Destinations | None:
    """Reserve blocks and a row for the part that the device lacks; return None if something is
    missing."""
    config, ledger, boundary = cache.config, cache.ledger, arrival.boundary
    full, rest = divmod(boundary, config.block_size)
    present = len(lease.path)
    wanted = {keys.block_keys[index]: index for index in range(present, full)}
    if rest and full >= present and ledger.trie.node_at(lease.path, keys, boundary) is None:
        wanted[key_at(keys, boundary)] = full
    if not arrival.kv.keys() >= wanted.keys() or (config.has_state and arrival.state is None):
        return None
    count = max(wanted.values()) + 1 - present if wanted else 0
    if count > cache.available_block_count:
        return None
    if count and not cache.grow(lease, (present + count) * config.block_size):
        return None
    row = -1
    if config.has_state:
        reserved = cache.reserve_snapshot(lease, boundary, "tier")
        if reserved is None:
            return None
        row = reserved
    # Reserving may have evicted the tail on which the boundary depends.
    on_device = rest and full >= present and key_at(keys, boundary) not in wanted
    if on_device and ledger.trie.node_at(lease.path, keys, boundary) is None:
        return None
    return Destinations({key: lease.blocks[index] for key, index in wanted.items()}, row)


def _give_experts(ledger: Ledger, lease: Lease, keys: PromptKeys, arrival: Arrival) -> None:
    nodes = list(lease.path)
    if arrival.boundary % keys.block_size:
        tail = ledger.trie.node_at(lease.path, keys, arrival.boundary)
        assert tail is not None
        nodes.append(tail)
    for node in nodes:
        rows = arrival.experts.get(node.key)
        if rows is not None and node.experts is None and len(rows) == node.num_tokens:
            node.experts = rows
            ledger.expert_bytes += rows.nbytes
            ledger.used(node)
