"""Writes entries that other servers are likely to need to the shared store, in the background.

A ready snapshot becomes a write request: its state and the KV up to it. The store is first asked
which of these it lacks and no other server is writing. Only those are read from the device, piece
by piece between the engine's steps, so that no bytes queue up.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from vlm_serve.cache.events import CacheEvents
from vlm_serve.cache.marks import KnownMarks
from vlm_serve.cache.records import Node, Snapshot
from vlm_serve.cache.tiers.entry import BadEntryError, Entry, EntryId, Kind, Sealed, seal, unseal
from vlm_serve.cache.tiers.mark_records import joined, record_beside
from vlm_serve.cache.tiers.stack import TierStack
from vlm_serve.cache.tiers.store import Store
from vlm_serve.cache.tiers.transfer import Transfer, read_entry

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_LIKELY = frozenset({"media", "system", "junction", "tier", "mark"})
POLICIES: dict[str, frozenset[str] | None] = {
    "media": _LIKELY,
    "stable": _LIKELY | {"stable_end", "prompt_end", "message", "decode"},
    "all": None,
}
"""Kinds of snapshots that are shared; None: all. Content loaded from a tier counts as requested
again, and a mark says that it will be."""
MAX_WRITE_REQUESTS = 4096
MOST_OFFERED_BYTES = 128 << 20
"""Most bytes of entries with their content that wait to be written."""
PIECE_BYTES = 8 << 20
"""Approximate bytes per read from the device."""
WRITE_SECONDS = 20.0
"""Time limit for writing one piece."""


class WritableStore(Store, Protocol):
    """A store whose entries are claimed before they are written."""

    async def claim(self, ids: Collection[EntryId]) -> set[EntryId]:
        """Return the entries that the caller is to write."""
        ...


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """A write request. `nodes`: from the root on, or a single one in a model without states.
    `snapshot`: of the last node. `marks`: the record of the last node's mark, if it has one."""

    nodes: tuple[Node, ...]
    snapshot: Snapshot | None
    marks: Entry | None = None


Source = Node | Snapshot | Entry


class Sharer:
    """Writes to a stack's shared store. Requests that it could not fulfil are counted as
    "unshared" in the stack's counts.

    Args:
        stack: whose store and thread are used.
        store: that store.
        transfer: reads blocks and rows, on the engine's thread.
        marks: the cut points that prompts have brought.
        kinds: of snapshots to share; None: all.
        exact_only: skip entries made by decoding, whose bits are not those of prefill.
        bandwidth: most bytes per second to write.
        has_state: False for a model without state layers: each of its blocks is shared.

    Attributes:
        post: runs a function on the engine's thread, between steps; None before the engine starts.
    """

    def __init__(
        self,
        stack: TierStack,
        store: WritableStore,
        transfer: Transfer,
        marks: KnownMarks,
        *,
        kinds: frozenset[str] | None,
        exact_only: bool,
        bandwidth: float,
        has_state: bool,
    ) -> None:
        self.post: Callable[[Callable[[], None]], None] | None = None
        self._stack = stack
        self._store = store
        self._transfer = transfer
        self._marks = marks
        self._kinds, self._exact_only, self._bandwidth = kinds, exact_only, bandwidth
        self._has_state = has_state
        self._lock = threading.Lock()
        self._requests: deque[WriteRequest | Entry] = deque()
        self._offered = 0
        self._running = False
        self._generation = 0
        self._free_at = 0.0

    # On the engine's thread

    def listen(self, events: CacheEvents) -> None:
        """Start sharing new entries."""
        if self._has_state:
            events.snapshot_ready.subscribe(self._snapshot_ready)
        else:
            events.node_added.subscribe(self._node_added)

    def forget(self) -> None:
        """Drop requested and unfinished writes after a flush."""
        with self._lock:
            self._generation += 1
            self._requests.clear()
            self._offered = 0

    def _node_added(self, node: Node) -> None:
        if node.exact or not self._exact_only:
            self._request((node,), None)

    def _snapshot_ready(self, snapshot: Snapshot) -> None:
        if self._kinds is not None and snapshot.kind not in self._kinds:
            return
        path, node = list[Node](), snapshot.node
        while isinstance(node, Node):
            path.append(node)
            node = node.parent  # type: ignore[assignment]
        if self._exact_only and not (snapshot.exact and all(node.exact for node in path)):
            return
        self._request(tuple(reversed(path)), snapshot)

    def _request(self, nodes: tuple[Node, ...], snapshot: Snapshot | None) -> None:
        record = record_beside(nodes[-1], self._marks, self._stack.origin)
        self._add(WriteRequest(nodes, snapshot, record))

    def _read_some(self, wanted: deque[tuple[EntryId, Source]]) -> list[Entry]:
        """Remove entries from the list and read them, about PIECE_BYTES."""
        entries, size = list[Entry](), 0
        while wanted and size < PIECE_BYTES:
            entry_id, source = wanted.popleft()
            if isinstance(source, Entry):
                entry: Entry | None = source
            else:
                entry = read_entry(self._transfer, entry_id, source)
            if entry is not None:
                entries.append(entry)
                size += entry.num_bytes
            else:
                self._stack.counts["unshared"] += 1
        return entries

    # On any thread

    def offer(self, entry: Entry) -> None:
        """Share an entry whose content is at hand."""
        with self._lock:
            if self._offered + entry.num_bytes > MOST_OFFERED_BYTES:
                self._stack.counts["unshared"] += 1
                return
            self._offered += entry.num_bytes
        self._add(entry)

    def _add(self, request: WriteRequest | Entry) -> None:
        with self._lock:
            if len(self._requests) >= MAX_WRITE_REQUESTS:
                self._stack.counts["unshared"] += 1
                return
            self._requests.append(request)
            if self._running:
                return
            self._running = True
        self._stack.submit(self._work())

    @property
    def idle(self) -> bool:
        """True if nothing is requested or in progress."""
        with self._lock:
            return not self._running

    # On the stack's thread

    async def _work(self) -> None:
        while True:
            with self._lock:
                requests, generation = list(self._requests), self._generation
                self._requests.clear()
                self._offered = 0
                self._running = bool(requests)
            if not requests:
                return
            try:
                await self._share(requests, generation)
            except Exception:
                self._stack.counts["unshared"] += len(requests)
                _log.exception("entries could not be written to the shared store")

    async def _share(self, requests: list[WriteRequest | Entry], generation: int) -> None:
        sources = {
            entry_id: content
            for request in requests
            for entry_id, content in self._sources(request)
        }
        call, store = self._stack.caller.call, self._store
        claimed = await call(store, store.claim, list(sources), limit=WRITE_SECONDS) or set()
        wanted = deque(source for source in sources.items() if source[0] in claimed)
        while wanted and generation == self._generation:
            entries = await self._on_engine(lambda: self._read_some(wanted))
            if generation != self._generation:
                return
            await self._write(entries)
        for request in requests:
            if isinstance(request, WriteRequest) and request.marks is not None:
                await self._tell(request.marks, generation)

    async def _tell(self, record: Entry, generation: int) -> None:
        """Add marks to what the store has of their block. It is written also if nothing is new,
        which renews it. Of two servers that write at once the last one wins."""
        call, store, block = self._stack.caller.call, self._store, record.id
        sealed = await call(store, store.get, [block], limit=WRITE_SECONDS) or {}
        with suppress(BadEntryError, KeyError):
            record = joined(record, unseal(sealed[block], block, self._stack.origin))
        if generation == self._generation:
            await self._write([record])

    def _sources(self, request: WriteRequest | Entry) -> Iterator[tuple[EntryId, Source]]:
        """Yield ids with the source of their content. The state comes last, because readers look
        for it first."""
        if isinstance(request, Entry):
            yield request.id, request
            return
        origin = self._stack.origin
        for node in request.nodes:
            yield origin.id(Kind.KV, node.key), node
            if node.experts is not None:
                yield origin.id(Kind.EXPERTS, node.key), node
        if request.snapshot is not None:
            yield origin.id(Kind.STATE, request.nodes[-1].key), request.snapshot

    async def _on_engine(self, function: Callable[[], _T]) -> _T:
        assert self.post is not None, "requests come from the engine"
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the stack was closed meanwhile
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.post(run)
        return await asyncio.wrap_future(future)

    async def _write(self, entries: list[Entry]) -> None:
        sealed: Mapping[EntryId, Sealed] = {
            entry.id: seal(entry, self._stack.origin) for entry in entries
        }
        if not sealed:
            return
        loop, store = asyncio.get_running_loop(), self._store
        put: Any = await self._stack.caller.call(store, store.put, sealed, limit=WRITE_SECONDS)
        self._stack.counts["unshared"] += len(sealed if put is None else put)
        size = sum(content.num_bytes for content in sealed.values())
        self._free_at = max(loop.time(), self._free_at) + size / self._bandwidth
        await asyncio.sleep(max(0.0, self._free_at - loop.time()))
