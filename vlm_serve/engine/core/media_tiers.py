"""Media in the lower cache tiers.

Vision embeddings are saved after encoding, and fetched before a request would encode them again.
Beside them are records of uploaded files; see `preprocess.upload_records`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from blake3 import blake3

from vlm_serve.cache.tiers.entry import Arriving, Content, Entry, EntryId, Kind
from vlm_serve.cache.tiers.stack import TierStack
from vlm_serve.cache.tiers.store import READ_LIMIT
from vlm_serve.cache.tiers.store_calls import WaitBudget
from vlm_serve.preprocess.identity.keys import tagged
from vlm_serve.preprocess.media.processing import MediaRecord
from vlm_serve.preprocess.media.raw_index import pack_record, unpack_record

AHEAD_BYTES = 64 << 20
"""Approximate bytes that one request prefetches at a time, for the spans behind the needed one."""

_log = logging.getLogger(__name__)
LAYOUT = "upload 1"

_DOMAIN = b"vlm-serve upload entry 1"
_T = TypeVar("_T")


@dataclass(frozen=True)
class EmbeddingForm:
    """Shape and type of an engine's embeddings: `[tokens, width]`."""

    width: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def layout(self, num_tokens: int) -> str:
        return f"{self.dtype}[{num_tokens}, {self.width}]".removeprefix("torch.")

    def rows(self, entry: Entry, num_tokens: int) -> torch.Tensor | None:
        """Return an entry's content; None if it has another form. Check before allocating
        memory."""
        fits = entry.num_tokens == num_tokens and entry.layout == self.layout(num_tokens)
        if not fits or len(entry.payload) != num_tokens * self.token_bytes:
            return None
        rows = torch.empty(num_tokens, self.width, dtype=self.dtype)
        rows.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(entry.payload, np.uint8)
        return rows


@dataclass(frozen=True)
class EmbeddingHit:
    """A fetched embedding and its tier."""

    rows: torch.Tensor
    tier: str


@dataclass(frozen=True)
class EmbeddingFetch:
    """A fetch of embeddings: (key, number of tokens) pairs."""

    wanted: tuple[tuple[bytes, int], ...]
    generation: int
    patience: WaitBudget


class EmbeddingTiers:
    """Fetches and saves embeddings. Coroutines run on the stack's thread, everything else on the
    engine's. A sequence requests a key once; embeddings that do not arrive are encoded.

    Args:
        stack: the tiers.
        form: shape and type of the embeddings.
        read: returns the embedding in a slot, if there is one.
        save: returns the content of an embedding that nobody overwrites.

    Attributes:
        ahead: True if embeddings are saved as soon as they are made, not only on eviction, because
            other servers can read them.
        starting: fetches that have not been submitted yet.
        num_bytes: bytes of fetched embeddings that wait for their step.
    """

    def __init__(
        self,
        stack: TierStack,
        form: EmbeddingForm,
        read: Callable[[int], torch.Tensor | None],
        save: Callable[[torch.Tensor], Content | Arriving] = lambda rows: to_bytes((rows,)),
    ) -> None:
        self.ahead = stack.reaches_others
        self.starting: list[EmbeddingFetch] = []
        self.num_bytes = 0
        self._stack, self._form, self._read, self._save = stack, form, read, save
        self._num_waiting = 0
        self._generation = 0
        self._requested: dict[int, set[bytes]] = {}
        self._in_flight: set[bytes] = set()
        self._arrived: dict[bytes, EmbeddingHit] = {}

    @property
    def busy(self) -> bool:
        """True while a fetch is in flight."""
        return self._num_waiting > 0

    def save(self, key: bytes, slot: int) -> None:
        """Save an embedding to the tiers, unless they have it. Never raise."""
        entry_id = self._stack.origin.id(Kind.EMBEDDINGS, key)
        try:
            if self._stack.holds(entry_id):
                self._stack.touch(entry_id)
                return
            rows = self._read(slot)
            if rows is not None:
                layout = self._form.layout(len(rows))
                self._stack.put(Entry(entry_id, len(rows), True, layout, self._save(rows)))
        except Exception:
            self._stack.counts["failed"] += 1
            _log.exception("an embedding could not be handed to the lower tiers")

    def poll(
        self,
        sequence: int,
        key: bytes,
        following: Callable[[], Sequence[tuple[bytes, int]]],
        patience: WaitBudget | None = None,
    ) -> bool | None:
        """Tell whether an embedding has been fetched; None means that the sequence must wait. The
        first call for a key requests it.

        Args:
            following: returns (key, number of tokens) of this embedding and of those needed next.
            patience: waiting time of the sequence so far; this wait is added.
        """
        requested = self._requested.setdefault(sequence, set())
        if key not in requested:
            self._request(requested, following(), patience or WaitBudget())
        if key in self._arrived:
            return True
        return None if key in self._in_flight else False

    def locate(self, keys: Collection[bytes]) -> Future[dict[bytes, str]]:
        """Find the tier of each key; keys that no tier has are left out. Change nothing. The
        engine's thread must not wait for the result."""
        return self._stack.submit(self._locate(tuple(keys)))

    def take(self, key: bytes) -> EmbeddingHit | None:
        """Remove and return a fetched embedding; None if there is none."""
        embedding = self._arrived.pop(key, None)
        self.num_bytes -= embedding.rows.nbytes if embedding is not None else 0
        return embedding

    def release(self, sequence: int) -> None:
        """Cancel a sequence's requests; drop embeddings that no other sequence has requested."""
        requested = self._requested.pop(sequence, set())
        for key in requested & self._arrived.keys():
            if not any(key in others for others in self._requested.values()):
                self.take(key)

    def forget(self) -> None:
        """Drop all fetched embeddings and ignore fetches in flight: the cache is flushed."""
        self._generation += 1
        for key in list(self._arrived):
            self.take(key)

    def finish(self, fetch: EmbeddingFetch, embeddings: dict[bytes, EmbeddingHit] | None) -> None:
        """Store the result of a fetch; None means that reading raised."""
        self._num_waiting -= 1
        self._in_flight.difference_update(key for key, _ in fetch.wanted)
        if embeddings is None:
            self._stack.counts["failed"] += 1
        if embeddings is None or fetch.generation != self._generation:
            return
        for key, embedding in embeddings.items():
            if any(key in requested for requested in self._requested.values()):
                self._arrived[key] = embedding
                self.num_bytes += embedding.rows.nbytes

    async def read(self, fetch: EmbeddingFetch) -> dict[bytes, EmbeddingHit]:
        """Read the embeddings of a fetch from the tiers; missing ones are left out."""
        loop, patience = asyncio.get_running_loop(), fetch.patience
        since = loop.time() - patience.spent
        try:
            return await self._look_and_read(fetch, since)
        finally:
            patience.spent = loop.time() - since

    async def _look_and_read(
        self, fetch: EmbeddingFetch, since: float
    ) -> dict[bytes, EmbeddingHit]:
        origin = self._stack.origin
        ids = {origin.id(Kind.EMBEDDINGS, key): tokens for key, tokens in fetch.wanted}
        places = await self._stack.locate(ids, since)
        entries = await self._stack.get(tuple(places), since) if places else {}
        rows = {name: self._form.rows(entry, ids[name]) for name, entry in entries.items()}
        foreign = [name for name, content in rows.items() if content is None]
        if foreign:
            await self._stack.discard_bad(foreign)
        return {
            name.key: EmbeddingHit(content, places[name])
            for name, content in rows.items()
            if content is not None
        }

    async def _locate(self, keys: Collection[bytes]) -> dict[bytes, str]:
        ids = [self._stack.origin.id(Kind.EMBEDDINGS, key) for key in keys]
        return {name.key: tier for name, tier in (await self._stack.locate(ids)).items()}

    def _request(
        self, requested: set[bytes], following: Sequence[tuple[bytes, int]], patience: WaitBudget
    ) -> None:
        wanted, size = [], 0
        for key, num_tokens in following:
            if key in requested:
                continue
            if size >= AHEAD_BYTES:
                break
            requested.add(key)
            size += num_tokens * self._form.token_bytes
            entry_id = self._stack.origin.id(Kind.EMBEDDINGS, key)
            new = key not in self._in_flight and key not in self._arrived
            if new and self._stack.may_hold(entry_id):
                wanted.append((key, num_tokens))
        if wanted:
            self._in_flight.update(key for key, _ in wanted)
            self.starting.append(EmbeddingFetch(tuple(wanted), self._generation, patience))
            self._num_waiting += 1


class UploadTiers:
    """`UploadRecords` in the tiers. Records are small: each is saved as soon as it is made.

    Args:
        stack: the tiers; `get` waits for each store no longer than the store's time limit.
    """

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
        limits = (min(store.time_limit, READ_LIMIT) for store in stack.stores)
        self._seconds = 1.0 + 2 * sum(limits)

    def get(self, key: bytes) -> MediaRecord | None:
        entry_id = self._id(key)
        if not self._stack.may_hold(entry_id):
            return None
        reading = self._submit(self._read(entry_id))
        try:
            return reading.result(self._seconds) if reading is not None else None
        except Exception:  # including TimeoutError
            self._stack.counts["failed"] += 1
            _log.exception("the record of an upload could not be read")
            return None

    def put(self, key: bytes, record: MediaRecord) -> None:
        entry = self._entry(key, record)
        if self._stack.holds(entry.id):
            self._stack.touch(entry.id)
        else:
            self._stack.put(entry)

    def replace(self, key: bytes, record: MediaRecord) -> None:
        self._submit(self._stack.replace(self._entry(key, record)))

    def _id(self, key: bytes) -> EntryId:
        """Return the entry's id; it includes the model, since several models may share a store."""
        origin = self._stack.origin
        fields = (tagged("domain", _DOMAIN), tagged("model", origin.model), tagged("upload", key))
        return origin.id(Kind.UPLOAD, blake3(b"".join(fields)).digest())

    def _entry(self, key: bytes, record: MediaRecord) -> Entry:
        return Entry(self._id(key), len(record.hashes), True, LAYOUT, pack_record(record))

    async def _read(self, entry_id: EntryId) -> MediaRecord | None:
        epoch = self._stack.epoch
        entry = (await self._stack.get([entry_id])).get(entry_id)
        if entry is None or epoch != self._stack.epoch:
            return None
        record = unpack_record(bytes(entry.payload)) if entry.layout == LAYOUT else None
        if record is None or len(record.hashes) != entry.num_tokens:
            await self._stack.discard_bad([entry_id])
            return None
        return record

    def _submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T] | None:
        try:
            return self._stack.submit(work)
        except RuntimeError:  # the engine has ended
            work.close()
            return None


def to_bytes(parts: Sequence[torch.Tensor]) -> bytes:
    """Return the content of tensors, concatenated."""
    arrays = [part.contiguous().view(-1).view(torch.uint8).cpu().numpy() for part in parts]
    if len(arrays) == 1:
        return arrays[0].tobytes()
    return b"".join(array.data for array in arrays)
