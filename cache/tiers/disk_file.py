"""Sealed entries in one SQLite file, bounded by bytes, evicted least recently used first.

SQLite instead of a memory-mapped store: of 40 files with flipped bits or a missing end, LMDB killed
the process on 11 (SIGBUS), while SQLite reported every one. Each batch is one transaction of the
write-ahead log. A killed process loses only the batch in progress.

The file is locked for one process. So SQLite needs no `-shm`, a mapped file whose truncation would
kill the process, and no other process's lock can hold up a request.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from vlm_serve.cache.tiers.disk_place import (
    APPLICATION_ID,
    FILE_NAME,
    SCHEMA,
    claim,
    identity,
    prepare_folder,
    remove,
)
from vlm_serve.cache.tiers.entry import EntryId, Kind, Sealed
from vlm_serve.system.private_files import folder_lock

PAGE_BYTES = 8192
ROW_BYTES = 512
"""Overhead of a row beside its content, rounded up."""
BUSY_SECONDS = 2.0
"""Longest wait for another process's lock while the file is opened."""

_log = logging.getLogger(__name__)

_REFUSED = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_TOOBIG,
}
"""Errors that do not indicate damaged content."""
_NO_ROOM = {sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_FULL, sqlite3.SQLITE_TOOBIG}
"""Those of them that lose only the data being written; the file stays readable."""
_KINDS = {kind.value for kind in Kind}
_DELETE = "DELETE FROM entries WHERE kind = ? AND key = ?"


class DiskFile:
    """A file of entries. Any thread may call any method; `known`, `in` and `use` never wait for the
    disk.

    Failures of the disk are counted in `errors`. A full disk loses only the data being written, and
    a damaged file is replaced by an empty one. Any other failure raises OSError until `reopen`
    succeeds.

    Args:
        folder: the file's folder; created if missing. Files of other names are never touched.
        max_bytes: most bytes of entries, counted in whole pages, without the write-ahead log.

    Raises:
        OSError: the folder is not writable, or the file there is not ours to write.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        assert max_bytes >= 0
        self.max_bytes = max_bytes
        self.errors = 0
        self.evictions = 0
        self._told = False
        self._path = folder / FILE_NAME
        self._io = threading.Lock()
        self._books = threading.Lock()
        self._sizes: dict[EntryId, int] = {}
        self._num_bytes = 0
        prepare_folder(folder)
        self._start()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, entry_id: EntryId) -> bool:
        return entry_id in self._sizes

    def known(self) -> list[EntryId]:
        """Return the ids of the entries on disk, least recently used first."""
        return list(self._sizes)

    def use(self, ids: Iterable[EntryId]) -> None:
        """Mark entries as the most recently used ones."""
        with self._books:
            for entry_id in ids:
                if entry_id in self._sizes:
                    self._sizes[entry_id] = self._sizes.pop(entry_id)

    @property
    def num_bytes(self) -> int:
        """Bytes of entries on disk, in whole pages."""
        return self._num_bytes

    def write(self, entries: Mapping[EntryId, Sealed]) -> set[EntryId]:
        """Store entries in one transaction, evicting the least recently used ones for space. Return
        the ids that are not on disk now: evicted ones, and entries too large to fit, or all if the
        disk refused."""
        sizes = {entry_id: _size_on_disk(sealed) for entry_id, sealed in entries.items()}
        wanted = {i: s for i, s in entries.items() if sizes[i] <= self.max_bytes}
        while sum(sizes[i] for i in wanted) > self.max_bytes:
            del wanted[next(iter(wanted))]
        if not wanted:
            return set(entries)
        with self._io:
            victims = self._victims(sum(sizes[i] for i in wanted), set(wanted))
            if not self._transaction(victims, wanted):
                return set(entries)
            with self._books:
                for entry_id in (*victims, *wanted):
                    self._forget(entry_id)
                for entry_id in wanted:
                    self._sizes[entry_id] = sizes[entry_id]
                    self._num_bytes += sizes[entry_id]
            self.evictions += len(victims)
        return {*victims, *(entries.keys() - wanted.keys())}

    def read(self, ids: Iterable[EntryId]) -> dict[EntryId, Sealed]:
        """Return entries as they were stored, without missing and unreadable ones."""
        found = {}
        with self._io:
            for entry_id in ids:
                try:
                    row = self._connection.execute(
                        "SELECT header, payload FROM entries WHERE kind = ? AND key = ?",
                        _place(entry_id),
                    ).fetchone()
                except sqlite3.Error as error:
                    self._failed(error)
                    continue
                if row is not None and all(isinstance(part, bytes) for part in row):
                    found[entry_id] = Sealed(*row)
        return found

    def remove(self, ids: Collection[EntryId]) -> None:
        """Remove entries, for example damaged ones."""
        with self._io:
            if self._transaction(ids, {}):
                with self._books:
                    for entry_id in ids:
                        self._forget(entry_id)

    def remove_all(self) -> None:
        """Remove everything."""
        with self._io:
            try:
                self._connection.execute("DELETE FROM entries")
                self._connection.executescript("PRAGMA incremental_vacuum")
            except sqlite3.Error as error:
                self._failed(error)
                self._replace()  # a full disk still allows removing files
            self._forget_all()

    def reopen(self) -> None:
        """Ensure that the file is writable, opening it if a failure has closed it."""
        with self._io:
            try:
                self._connection.execute("PRAGMA user_version = 1")
            except sqlite3.ProgrammingError:
                self._start()
            except sqlite3.Error as error:
                self._failed(error)

    def shut(self) -> None:
        """Close the file for good."""
        with self._io, suppress(sqlite3.Error):
            self._connection.close()

    # Inside the locks

    def _victims(self, num_bytes: int, replaced: set[EntryId]) -> list[EntryId]:
        """Return the least recently used entries to evict for `num_bytes` more."""
        with self._books:
            excess = self._num_bytes + num_bytes - self.max_bytes
            excess -= sum(self._sizes.get(entry_id, 0) for entry_id in replaced)
            victims = []
            for entry_id, size in self._sizes.items():
                if excess <= 0:
                    break
                if entry_id not in replaced:
                    victims.append(entry_id)
                    excess -= size
            return victims

    def _transaction(self, removed: Iterable[EntryId], added: dict[EntryId, Sealed]) -> bool:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(_DELETE, map(_place, removed))
            connection.executemany(
                "INSERT OR REPLACE INTO entries (kind, key, size, header, payload)"
                " VALUES (?, ?, ?, ?, ?)",
                [(*_place(i), _size_on_disk(s), s.header, s.payload) for i, s in added.items()],
            )
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._failed(error)
            return False
        return True

    def _failed(self, error: sqlite3.Error) -> None:
        """Count a failure. Raises OSError unless the cause is a full disk, or damage, which
        replaces the file."""
        self.errors += 1
        with suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        code = _code(error)
        if not code or code in _REFUSED - _NO_ROOM:
            # Its index of the log may describe a log that somebody has cut: open it anew.
            self._connection.close()
            raise OSError(f"{self._path}: {error}") from error
        if code not in _NO_ROOM:
            self._replace()
        elif not self._told:
            self._told = True
            _log.warning("%s: %s: the cache tier is read, and not written", self._path, error)

    def _replace(self) -> None:
        """Replace the open file by an empty one; it stays closed if that raises OSError."""
        self._connection.close()
        with folder_lock(self._path.parent):
            self._start_anew()

    def _start(self) -> None:
        """Open the file, replacing a damaged one by an empty one. Raises OSError."""
        self._forget_all()
        # Another server may be replacing the file at the same time.
        with folder_lock(self._path.parent):
            try:
                self._connection = self._open()
            except sqlite3.Error as error:
                if _code(error) in _REFUSED:
                    raise self._refused(error) from error
                self.errors += 1
                self._start_anew()

    def _start_anew(self) -> None:
        self._forget_all()
        remove(self._path)
        try:
            self._connection = self._open()
        except sqlite3.Error as error:
            raise self._refused(error) from error

    def _refused(self, error: sqlite3.Error) -> OSError:
        busy = _code(error) == sqlite3.SQLITE_BUSY
        reason = "another server or program uses it" if busy else error
        return OSError(f"{self._path}: {reason}")

    def _open(self) -> sqlite3.Connection:
        claimed = claim(self._path)
        connection = sqlite3.connect(
            self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            self._set_up(connection)
            if identity(self._path) != claimed:
                raise OSError(f"{self._path} was exchanged while it was opened")
        except (sqlite3.Error, OSError):
            connection.close()
            raise
        return connection

    def _set_up(self, connection: sqlite3.Connection) -> None:
        for setting in (
            "locking_mode = EXCLUSIVE",
            f"page_size = {PAGE_BYTES}",
            "auto_vacuum = INCREMENTAL",
            f"application_id = {APPLICATION_ID}",
            "journal_mode = WAL",
            # Nothing committed is lost when the process dies; a power cut may cost the last batch.
            "synchronous = NORMAL",
            f"journal_size_limit = {64 << 20}",
        ):
            connection.execute(f"PRAGMA {setting}").fetchall()
        connection.execute(SCHEMA)
        rows = connection.execute("SELECT kind, key, size FROM entries ORDER BY number").fetchall()
        with self._books:
            for kind, key, size in rows:
                entry_id = _entry_id(kind, key)
                if entry_id is not None and isinstance(size, int):
                    self._sizes[entry_id] = size
                    self._num_bytes += size
        self._shrink(connection)

    def _shrink(self, connection: sqlite3.Connection) -> None:
        """Evict entries beyond the byte limit, which may have been lowered. This also tests at once
        whether the file is writable."""
        victims = self._victims(0, set())
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(_DELETE, map(_place, victims))
        connection.execute("COMMIT")
        if victims:
            connection.executescript("PRAGMA incremental_vacuum")
        with self._books:
            for entry_id in victims:
                self._forget(entry_id)

    def _forget_all(self) -> None:
        with self._books:
            self._sizes.clear()
            self._num_bytes = 0

    def _forget(self, entry_id: EntryId) -> None:
        self._num_bytes -= self._sizes.pop(entry_id, 0)


def _place(entry_id: EntryId) -> tuple[int, bytes]:
    """Return kind and key in the file. The kind's column includes the rank of a split model."""
    return entry_id.kind | entry_id.rank << 8 | (entry_id.world - 1) << 24, entry_id.key


def _entry_id(kind: object, key: object) -> EntryId | None:
    """Reverse `_place`; return None for a row of another format."""
    if not isinstance(kind, int) or not isinstance(key, bytes) or kind & 0xFF not in _KINDS:
        return None
    return EntryId(Kind(kind & 0xFF), key, kind >> 8 & 0xFFFF, (kind >> 24) + 1)


def _code(error: sqlite3.Error) -> int:
    """Return SQLite's primary result code; 0 for an error of Python's module."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _size_on_disk(sealed: Sealed) -> int:
    return -(-(sealed.num_bytes + ROW_BYTES) // PAGE_BYTES) * PAGE_BYTES
