"""Whose the files of the disk tier are, who may read them, and what is left alone."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from other_user import NOBODY, as_nobody, mode, needs_root, open_folder, umask
from tier_entries import entry

from vlm_serve.cache.tiers.disk import APPLICATION_ID, FILE_NAME, SCHEMA, SUFFIXES, DiskStore
from vlm_serve.cache.tiers.entry import Sealed

SIZE = 1 << 20
ROW = {entry(1).id: Sealed(b"header", b"payload")}


def fill(folder: Path) -> DiskStore:
    """A tier with one entry, which its caller closes."""
    store = DiskStore(folder, SIZE)
    assert store.write(ROW) == set()
    return store


def filled(folder: Path) -> Path:
    """A database with one entry, which nobody has open."""
    fill(folder).shut()
    return folder / FILE_NAME


def holds(folder: Path) -> bool:
    """Whether the entry is there at a start."""
    store = DiskStore(folder, SIZE)
    try:
        return store.read(ROW) == ROW
    finally:
        store.shut()


def execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for each in statements:
            connection.execute(each).fetchall()


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_what_is_made_is_this_users_alone(tmp_path: Path, mask: int) -> None:
    folder = tmp_path / "one" / "two"
    with umask(mask):
        store = fill(folder)
        found = {each.name: mode(each) for each in folder.iterdir()}
        store.shut()
    assert found == {FILE_NAME + suffix: 0o600 for suffix in ("", "-wal")}
    assert mode(folder) == mode(folder.parent) == 0o700


@needs_root
def test_nobody_reads_it() -> None:
    with open_folder() as folder, umask(0):
        (folder / "shared").mkdir(mode=0o777)
        (folder / "shared" / "else").touch()
        store = fill(folder / "shared")
        for suffix in ("", "-wal"):
            path = folder / "shared" / (FILE_NAME + suffix)
            assert as_nobody('cat "$1"', path).returncode != 0
            assert as_nobody('echo >> "$1"', path).returncode != 0
        store.shut()


def test_files_of_an_older_version_are_made_private(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    store = fill(folder)
    data = {each.name: each.read_bytes() for each in folder.iterdir()}
    store.shut()
    folder.chmod(0o755)
    for name, content in data.items():  # As after SIGKILL.
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o644)
    again = DiskStore(folder, SIZE)
    assert again.read(ROW) == ROW and not again.errors
    assert {mode(each) for each in folder.iterdir()} == {0o600}
    again.shut()
    assert mode(folder) == 0o700


def test_a_folder_with_other_things_in_it_keeps_its_mode(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "data").touch()
    for permissions in (0o755, 0o2775, 0o777):
        folder.chmod(permissions)
        assert mode(filled(folder)) == 0o600
        assert mode(folder) == permissions
        assert mode(folder / "data") == 0o644


def test_a_folder_that_was_not_ours_so_far_keeps_its_mode(tmp_path: Path) -> None:
    """It may be /mnt, or be about to be used by others."""
    folder = tmp_path / "given"
    folder.mkdir()
    for permissions in (0o755, 0o2775, 0o1777):
        folder.chmod(permissions)
        path = filled(folder)
        assert mode(folder) == permissions
        assert mode(path) == 0o600
        path.unlink()


def test_a_folder_for_everybody_stays_one(tmp_path: Path) -> None:
    """/tmp, with nothing else in it."""
    folder = tmp_path / "sticky"
    folder.mkdir()
    folder.chmod(0o1777)
    for _ in range(2):
        filled(folder)
        assert mode(folder) == 0o1777


@pytest.mark.parametrize(
    ("permissions", "warned"), [(0o755, False), (0o1777, False), (0o777, True)]
)
def test_a_folder_that_others_may_write_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, permissions: int, warned: bool
) -> None:
    (tmp_path / "data").touch()
    tmp_path.chmod(permissions)
    filled(tmp_path)
    assert ("disk_cache_path: others may write in" in caplog.text) == warned


def test_a_database_that_others_could_write_is_begun_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled(tmp_path)
    assert holds(tmp_path) and not caplog.text
    for permissions in (0o666, 0o660, 0o602):
        filled(tmp_path)
        path.chmod(permissions)
        assert not holds(tmp_path)
        assert "could be written by others" in caplog.text
        assert mode(path) == 0o600


def refused(folder: Path, why: str) -> None:
    with pytest.raises(OSError, match=why) as caught:
        DiskStore(folder, SIZE)
    assert FILE_NAME in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", ["link", "broken link", "link to a folder", "hard link"])
def test_another_file_is_not_written_through_a_link(tmp_path: Path, suffix: str, kind: str) -> None:
    folder, target = tmp_path / "cache", tmp_path / "target"
    filled(folder)
    link = folder / (FILE_NAME + suffix)
    link.unlink(missing_ok=True)
    if kind == "link to a folder":
        target.mkdir()
    elif kind != "broken link":
        filled(tmp_path / "other").rename(target)
    before = target.read_bytes() if target.is_file() else None
    if kind == "hard link":
        link.hardlink_to(target)
    else:
        link.symlink_to(target)
    refused(folder, "has another name" if kind == "hard link" else "is a link")
    assert (target.read_bytes() if target.is_file() else None) == before
    assert target.exists() == (kind != "broken link")


@needs_root
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_another_user_owns_is_not_used(tmp_path: Path, suffix: str) -> None:
    filled(tmp_path)
    path = tmp_path / (FILE_NAME + suffix)
    path.touch()
    os.chown(path, NOBODY, NOBODY)
    before = path.read_bytes()
    refused(tmp_path, "belongs to another user")
    assert path.read_bytes() == before


OURS = SCHEMA.replace("IF NOT EXISTS ", "")
FOREIGN: dict[str, tuple[str, ...]] = {
    "other columns": ("CREATE TABLE entries (id INTEGER PRIMARY KEY, title TEXT)",),
    "one column more": (OURS.replace("payload", "more TEXT, payload"),),
    "other tables": ("CREATE TABLE notes (id INTEGER)",),
    "a table more": (OURS, "CREATE TABLE notes (id INTEGER)"),
    "a trigger": (OURS, "CREATE TRIGGER t AFTER DELETE ON entries BEGIN SELECT 1; END"),
    "a view of that name": ("CREATE VIEW entries AS SELECT 1 AS number",),
    "an id of its own": ("PRAGMA application_id = 7", OURS),
    "a version of its own": ("PRAGMA user_version = 3", OURS),
}


@pytest.mark.parametrize("journal", ["DELETE", "WAL"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_database_of_another_program_is_left_alone(
    tmp_path: Path, kind: str, journal: str
) -> None:
    path = tmp_path / FILE_NAME
    execute(path, f"PRAGMA journal_mode = {journal}", *FOREIGN[kind])
    before = path.read_bytes()
    refused(tmp_path, "is a database of another program")
    assert path.read_bytes() == before


def test_the_log_of_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    """All that it has may still be in there."""
    path = tmp_path / FILE_NAME
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.execute("CREATE TABLE notes (id INTEGER)")
        before = {each: path.with_name(path.name + each).read_bytes() for each in ("", "-wal")}
        refused(tmp_path, "is a database of another program")
        assert before == {each: path.with_name(path.name + each).read_bytes() for each in before}
        assert connection.execute("SELECT count(*) FROM notes").fetchone() == (0,)


def without_id(path: Path) -> None:
    execute(path, "PRAGMA application_id = 0")


def in_its_log(path: Path) -> None:
    """As after SIGKILL: not even the table is in the database itself."""
    path.unlink()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.execute(SCHEMA)
        connection.execute(
            "INSERT INTO entries (kind, key, size, header, payload) VALUES (?, ?, 1, ?, ?)",
            (entry(1).id.kind, entry(1).id.key, b"header", b"payload"),
        )
        names = [path.with_name(path.name + suffix) for suffix in ("", "-wal")]
        data = [each.read_bytes() for each in names]
    for each, content in zip(names, data, strict=True):
        each.write_bytes(content)


@pytest.mark.parametrize("make", [without_id, in_its_log])
def test_a_database_of_an_older_version_is_taken_over(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = filled(tmp_path)
    make(path)
    assert holds(tmp_path)
    assert int.from_bytes(path.read_bytes()[68:72], "big") == APPLICATION_ID


@pytest.mark.parametrize("content", [b"", b"no database at all" * 100, b"SQLite format 3\0" * 10])
def test_what_is_no_database_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert not holds(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes().startswith(b"SQLite format 3\0")


def test_a_damaged_file_is_not_replaced_by_what_a_link_leads_to(tmp_path: Path) -> None:
    """While the server runs."""
    target = tmp_path / "target"
    target.write_bytes(b"somebody's")
    store = fill(tmp_path / "cache")
    path = tmp_path / "cache" / FILE_NAME
    path.unlink()
    path.symlink_to(target)
    store._failed(sqlite_error(sqlite3.SQLITE_CORRUPT))
    assert target.read_bytes() == b"somebody's" and not path.is_symlink()
    assert store.write(ROW) == set()
    store.shut()


def sqlite_error(code: int) -> sqlite3.Error:
    error = sqlite3.DatabaseError("damaged")
    error.sqlite_errorcode = code
    return error


STARTS = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from tier_entries import entry
from vlm_serve.cache.tiers.disk import DiskStore
from vlm_serve.cache.tiers import disk
from vlm_serve.cache.tiers.entry import Sealed
disk.BUSY_SECONDS = 0.05
for number, line in enumerate(sys.stdin):
    try:
        store = DiskStore(Path(line.strip()), 1 << 20)
        left = store.write({entry(number).id: Sealed(b"header", b"payload")})
        print("left" if left else "written", store.errors, flush=True)
        sys.stdin.readline()
        store.shut()
    except OSError as error:
        print(error, flush=True)
        sys.stdin.readline()
"""


def test_of_servers_that_start_at_once_one_has_the_file(tmp_path: Path) -> None:
    """Also if each of them finds one that is to be begun anew; the others are told so.

    The one that has it keeps it until all have answered, so how long they wait means nothing.
    """
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", STARTS, "-", *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(4)
    ]
    for number in range(12):
        folder = tmp_path / str(number)
        if number % 3 == 1:
            folder.mkdir()
            (folder / FILE_NAME).write_bytes(b"no database" * 1000)
        elif number % 3 == 2:
            filled(folder).chmod(0o666)
            folder.chmod(0o777)
        said = []
        for line in (f"{folder}\n", "\n"):
            for server in servers:
                assert server.stdin is not None
                server.stdin.write(line)
                server.stdin.flush()
            if line.strip():
                said = [server.stdout.readline() for server in servers if server.stdout]
        errors = sum(int(line.split()[-1]) for line in said if line.startswith("written"))
        told = [line for line in said if "another server or program uses it" in line]
        assert len(told) == 3, (number, said)
        assert sum(line.startswith("written") for line in said) == 1, (number, said)
        assert errors <= 1, "one of them has found the damage"
    for server in servers:
        server.communicate()
        assert server.returncode == 0
