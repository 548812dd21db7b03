"""The tier on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from vlm_serve.cache.tiers.disk_file import DiskFile
from vlm_serve.cache.tiers.entry import EntryId, Sealed
from vlm_serve.cache.tiers.store import TIME_LIMIT


class DiskStore(DiskFile):
    """See `Store`. Reading and writing happen in threads of the event loop's executor; `contains`
    and `touch` go by the books in memory."""

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
        await asyncio.to_thread(self.reopen)  # waits for whoever works on the file
        return self.known()

    async def contains(self, ids: Collection[EntryId]) -> set[EntryId]:
        return {entry_id for entry_id in ids if entry_id in self}

    async def get(self, ids: Collection[EntryId]) -> dict[EntryId, Sealed]:
        present = await self.contains(ids)
        found = await asyncio.to_thread(self.read, [each for each in ids if each in present])
        self.use(found)
        return found

    async def put(self, entries: Mapping[EntryId, Sealed]) -> dict[EntryId, Sealed | None]:
        present = await self.contains(entries)
        self.use(present)
        new = {entry_id: each for entry_id, each in entries.items() if entry_id not in present}
        gone = await asyncio.to_thread(self.write, new) if new else set()
        return {entry_id: new.get(entry_id) for entry_id in gone}

    async def touch(self, ids: Collection[EntryId]) -> None:
        self.use(ids)

    async def delete(self, ids: Collection[EntryId]) -> None:
        await asyncio.to_thread(self.remove, ids)

    async def doubt(self, ids: Collection[EntryId]) -> None:
        pass

    async def sink(self) -> dict[EntryId, Sealed]:
        return {}

    async def clear(self) -> None:
        await asyncio.to_thread(self.remove_all)

    async def close(self) -> None:
        """The log is folded into the file."""
        await asyncio.to_thread(self.shut)
