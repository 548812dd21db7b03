"""The tier on disk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TypeVar

from vlm_serve.cache.tiers.daemon_thread import in_daemon_thread
from vlm_serve.cache.tiers.disk_file import DiskFile
from vlm_serve.cache.tiers.entry import EntryId, Sealed
from vlm_serve.cache.tiers.store import TIME_LIMIT

_T = TypeVar("_T")


class DiskStore(DiskFile):
    """See `Store`. Reads and writes run in daemon threads; `contains` and `touch` use the index in
    memory."""

    name = "disk"
    private = True
    lasting = True
    time_limit = TIME_LIMIT

    @property
    def counters(self) -> Mapping[str, int]:
        return {"bytes": self.num_bytes, "errors": self.errors, "evictions": self.evictions}

    @property
    def place(self) -> str:
        return str(self._path.parent)

    async def open(self) -> list[EntryId]:
        await self._in_thread(self.reopen)  # waits for the file's lock
        return self.known()

    async def contains(self, ids: Collection[EntryId]) -> set[EntryId]:
        return {entry_id for entry_id in ids if entry_id in self}

    async def get(self, ids: Collection[EntryId]) -> dict[EntryId, Sealed]:
        present = await self.contains(ids)
        found = await self._in_thread(partial(self.read, [each for each in ids if each in present]))
        self.use(found)
        return found

    async def put(self, entries: Mapping[EntryId, Sealed]) -> dict[EntryId, Sealed | None]:
        present = await self.contains(entries)
        self.use(present)
        new = {entry_id: each for entry_id, each in entries.items() if entry_id not in present}
        gone = await self._in_thread(partial(self.write, new)) if new else set()
        return {entry_id: new.get(entry_id) for entry_id in gone}

    async def touch(self, ids: Collection[EntryId]) -> None:
        self.use(ids)

    async def delete(self, ids: Collection[EntryId]) -> None:
        await self._in_thread(partial(self.remove, ids))

    async def doubt(self, ids: Collection[EntryId]) -> None:
        pass

    async def sink(self) -> dict[EntryId, Sealed]:
        return {}

    async def clear(self) -> None:
        await self._in_thread(self.remove_all)

    async def close(self) -> None:
        """Close the file, folding its log into it."""
        await self._in_thread(self.shut)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await in_daemon_thread(self.name, work)
