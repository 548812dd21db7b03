"""The folder and the file of the disk tier: private to this user, and no other file is ever
written.

Entries reveal prompts. SQLite gives its log and its index the mode of the database, and follows
links. Existing files at their paths are therefore checked first.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from vlm_serve.system.private_files import (
    OTHERS_WRITE,
    UnsafePathError,
    check_path,
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
_log = logging.getLogger(__name__)


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
    found = {}
    for suffix in SUFFIXES:
        each = path.with_name(path.name + suffix)
        with suppress(FileNotFoundError):  # Another server may have just folded its log.
            found[each] = _checked(each, owner)
    if path in found:
        _check_content(path)
    if has_modes and any(status.st_mode & OTHERS_WRITE for status in found.values()):
        _log.warning("%s could be written by others: it is begun anew", path)
        remove(path)
        found = {}
    for each in found:
        with suppress(OSError):
            each.chmod(0o600)
    if path not in found:
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
