"""The tier on disk: sealed entries in one SQLite file, bounded by bytes, evicted least recently
used first.

SQLite instead of a memory-mapped store: of 40 files with flipped bits or a missing end, LMDB killed
the process on 11 (SIGBUS), while SQLite reported every one. Each batch is one transaction of the
write-ahead log. A killed process loses only the batch in progress.

The file is locked for one process. So SQLite needs no `-shm`, a mapped file whose truncation would
kill the process, and no other process's lock can hold up a request.

Folder and file are private to this user, since entries reveal prompts, and no other file is ever
written. SQLite gives its log and its index the mode of the database, and follows links. Existing
files at their paths are therefore checked first.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from vlm_serve.cache.tiers.daemon_thread import in_daemon_thread
from vlm_serve.cache.tiers.entry import EntryId, Kind, Sealed
from vlm_serve.cache.tiers.store import TIME_LIMIT
from vlm_serve.system.private_files import (
    OTHERS_WRITE,
    UnsafePathError,
    check_path,
    folder_lock,
    is_own,
    make_private,
)

FILE_NAME = "vlm-serve-cache.sqlite"
SUFFIXES = ("", "-wal", "-shm", "-journal")
"""Suffixes of the database and of SQLite's files beside it."""
APPLICATION_ID = int.from_bytes(b"vlmC", "big")
"""Our id in the header of the database."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY, kind INTEGER NOT NULL, key BLOB NOT NULL, size INTEGER NOT NULL,
    header BLOB NOT NULL, payload BLOB NOT NULL, UNIQUE (kind, key))
"""

_OWN_TABLE = " ".join(SCHEMA.replace(" IF NOT EXISTS", "").split())
_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
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
_T = TypeVar("_T")


def prepare_folder(folder: Path) -> None:
    """Create the folder if it is missing, for this user alone.

    An existing one becomes private too if it is this user's and holds only our files, as left by an
    older version. Otherwise it keeps its mode, because others may use it; so does a sticky folder
    such as /tmp. Raises OSError.
    """
    if not folder.exists():
        make_private(folder)
        return
    status = folder.stat()
    open_to_others = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    for_all = status.st_mode & stat.S_ISVTX
    if open_to_others and not for_all and is_own(status) and _holds_ours_alone(folder):
        with suppress(OSError):  # A file system without modes.
            folder.chmod(0o700)
    try:
        check_path(folder)
    except UnsafePathError as error:
        _log.warning("disk_cache_path: %s, so others could remove or exchange the cache", error)


def _holds_ours_alone(folder: Path) -> bool:
    names = set(os.listdir(folder))
    return FILE_NAME in names and names <= {FILE_NAME + suffix for suffix in SUFFIXES}


def claim(path: Path) -> tuple[int, int]:
    """Ensure that the database at a path belongs to this user and is private; create an empty
    file if none exists.

    One that others could write is removed, because its content may be theirs.

    Returns its device and inode.

    Raises:
        OSError: the existing file is not ours to write; the message says why.
    """
    owner, has_modes = _made_here(path.parent)
    statuses = {}
    for suffix in SUFFIXES:
        file = path.with_name(path.name + suffix)
        with suppress(FileNotFoundError):  # Another server may have just folded its log.
            statuses[file] = _checked(file, owner)
    if path in statuses:
        _check_content(path)
    if has_modes and any(status.st_mode & OTHERS_WRITE for status in statuses.values()):
        _log.warning("%s could be written by others: it is begun anew", path)
        remove(path)
        statuses = {}
    for file in statuses:
        with suppress(OSError):
            file.chmod(0o600)
    if path not in statuses:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        with suppress(OSError):
            os.fchmod(descriptor, 0o600)
        os.close(descriptor)
    return identity(path)


def identity(path: Path) -> tuple[int, int]:
    """Return device and inode of the file at a path, of a link itself. Raises OSError."""
    status = path.lstat()
    return status.st_dev, status.st_ino


def remove(path: Path) -> None:
    """Remove the database and SQLite's files beside it. Raises OSError."""
    for suffix in SUFFIXES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _made_here(folder: Path) -> tuple[int, bool]:
    """Return the owner of a file that this process creates there, and whether files have modes.
    Network file systems may assign another owner, and some file systems have no modes."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        status = os.fstat(file.fileno())
        return status.st_uid, not status.st_mode & OTHERS_WRITE
    return os.geteuid(), True


def _checked(path: Path, owner: int) -> os.stat_result:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise OSError(f"{path} is a link, which could lead to another file")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is not a file")
    if status.st_uid != owner:
        raise OSError(f"{path} belongs to another user")
    if status.st_nlink > 1:
        raise OSError(f"{path} has another name, so it may be another program's")
    return status


def _check_content(path: Path) -> None:
    """Raise OSError for a database of another program. A file that is no database counts as
    damaged."""
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
        return
    version, application = header[60:64], int.from_bytes(header[68:72], "big")
    if application == APPLICATION_ID:
        return
    tables = _tables(path)
    if tables is not None and (application or any(version) or set(tables) - {_OWN_TABLE}):
        raise OSError(f"{path} is a database of another program")


def _tables(path: Path) -> list[str] | None:
    """Return the tables of a database without our id, from an older version or another program;
    None if it is damaged. Writes nothing."""
    has_log = path.with_name(path.name + "-wal").exists()
    how = "mode=ro" if has_log else "mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?{how}", uri=True)) as connection:
            rows = connection.execute(
                "SELECT sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_autoindex_entries_%'"
            ).fetchall()
    except sqlite3.Error:
        return None
    return [" ".join(str(sql).split()) for (sql,) in rows]


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
        sealed = {}
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
                    sealed[entry_id] = Sealed(*row)
        return sealed

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


class DiskStore(DiskFile):
    """See `Store`. Reads and writes run in daemon threads; `contains` and `touch` use the index in
    memory."""

    name = "disk"
    private = True
    lasting = True
    time_limit = TIME_LIMIT

    @property
    def counters(self) -> Mapping[str, int]:
        return {
            "bytes": self.num_bytes,
            "entries": len(self),
            "errors": self.errors,
            "evictions": self.evictions,
        }

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
        sealed = await self._in_thread(
            partial(self.read, [entry_id for entry_id in ids if entry_id in present])
        )
        self.use(sealed)
        return sealed

    async def put(self, entries: Mapping[EntryId, Sealed]) -> dict[EntryId, Sealed | None]:
        present = {each for each in await self.contains(entries) if each.kind is not Kind.MARKS}
        self.use(present)
        new = {
            entry_id: content for entry_id, content in entries.items() if entry_id not in present
        }
        gone = await self._in_thread(partial(self.write, new)) if new else set()
        return {entry_id: new.get(entry_id) for entry_id in gone}

    async def touch(self, ids: Collection[EntryId]) -> None:
        self.use(ids)

    async def discard(self, ids: Collection[EntryId]) -> None:
        await self._in_thread(partial(self.remove, ids))

    async def sink(self) -> dict[EntryId, Sealed]:
        return {}

    async def clear(self) -> None:
        await self._in_thread(self.remove_all)

    async def close(self) -> None:
        """Close the file, folding its log into it."""
        await self._in_thread(self.shut)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await in_daemon_thread(self.name, work)
