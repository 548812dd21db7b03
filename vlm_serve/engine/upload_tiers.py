"""Records of uploaded files in the lower cache tiers; see `preprocess.upload_records`."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from blake3 import blake3

from vlm_serve.cache.tiers.entry import Entry, EntryId, Kind
from vlm_serve.cache.tiers.stack import TierStack
from vlm_serve.cache.tiers.store import READ_LIMIT
from vlm_serve.preprocess.keys import tagged
from vlm_serve.preprocess.media_process import MediaRecord
from vlm_serve.preprocess.raw_index import pack_record, unpack_record

LAYOUT = "upload 1"

_DOMAIN = b"vlm-serve upload entry 1"
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


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
        record = unpack_record(entry.payload) if entry.layout == LAYOUT else None
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
