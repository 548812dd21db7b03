"""Stores that cannot be used when the stack starts, or no longer: it works without them until they
can."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tier_entries import ORIGIN, entry, get, locate
from waiting import wait_for

from vlm_serve.cache.tiers.deferred import DeferredStore
from vlm_serve.cache.tiers.disk import FILE_NAME, DiskStore
from vlm_serve.cache.tiers.entry import EntryId
from vlm_serve.cache.tiers.host import HostStore
from vlm_serve.cache.tiers.stack import TierStack
from vlm_serve.cache.tiers.store import Store
from vlm_serve.cache.tiers.store_calls import Breaker, line_of


class Moody(HostStore):
    """A store that opens and answers only if it is told to."""

    name = "moody"
    lasting = True

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(1 << 20)
        self.error = error
        self.num_opened = 0
        self.calls = 0

    async def open(self) -> tuple[EntryId, ...]:
        self.num_opened += 1
        if self.error is not None:
            raise self.error
        return tuple(self)

    async def contains(self, ids: Collection[EntryId]) -> set[EntryId]:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return await super().contains(ids)


@contextmanager
def stack(*stores: Store, rest: float = 0.02, open_seconds: float = 60.0) -> Iterator[TierStack]:
    tiers = TierStack(ORIGIN, stores, rest_seconds=rest, open_seconds=open_seconds)
    try:
        yield tiers
    finally:
        tiers.close(10.0)


def put(tiers: TierStack, number: int) -> None:
    tiers.put(entry(number))
    assert tiers.drain(60)


def test_a_store_that_does_not_open_is_not_asked_until_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    moody, behind = Moody(OSError("it is\nnot there.")), HostStore(1 << 20)
    with caplog.at_level(logging.INFO), stack(moody, behind) as tiers:
        assert not tiers.caller.is_up(moody) and tiers.caller.is_up(behind) and not tiers.lasting
        put(tiers, 1)
        assert locate(tiers, 1) == ["host"] and get(tiers, 1) == entry(1)
        assert not moody.calls and tiers.counts["failed_moody"] == 1 == len(caplog.records)
        wait_for(lambda: moody.num_opened > 3)
        assert caplog.messages == [
            "the cache tier 'moody' (memory of this process) cannot be used (it is not there): "
            "the server works without it and tries again"
        ]
        moody.error = OSError("no room")
        wait_for(lambda: len(caplog.records) > 1)
        assert "(no room)" in caplog.messages[1]
        moody.error = None
        wait_for(lambda: tiers.caller.is_up(moody))
        wait_for(lambda: "is used from now on" in caplog.messages[-1])
        put(tiers, 2)
        assert locate(tiers, 2) == ["moody"] and tiers.lasting
        assert all(record.exc_info is None for record in caplog.records)


def test_a_store_that_fails_is_opened_again_without_any_request() -> None:
    moody = Moody()
    with stack(moody) as tiers:
        put(tiers, 1)
        opened, moody.error = moody.num_opened, OSError("gone")
        assert locate(tiers, 1) == [None] and not tiers.caller.is_up(moody)
        calls = moody.calls
        wait_for(lambda: moody.num_opened > opened + 2)
        moody.error = None
        wait_for(lambda: tiers.caller.is_up(moody))
        assert moody.calls == calls and tiers.counts["failed_moody"] == 1
        assert locate(tiers, 1) == ["moody"]


def test_rests_grow_until_a_call_has_succeeded() -> None:
    breaker = Breaker(10.0)
    for now, rest in ((0.0, 10.0), (10.0, 20.0), (30.0, 40.0), (70.0, 80.0), (150.0, 80.0)):
        breaker.rest(now)
        assert breaker.is_open and breaker.seconds_left(now) == rest
    breaker.answered()
    assert not breaker.is_open and breaker.seconds_left(0.0) == 0.0
    assert breaker.admit(0.0) == "call" and breaker.ended("call", 0.0, failed=True)
    assert breaker.seconds_left(0.0) == 80.0, "it answers, and does not work"
    breaker.answered()
    assert breaker.admit(0.0) == "call" and not breaker.ended("call", 0.0, failed=False)
    breaker.rest(0.0)
    assert breaker.seconds_left(0.0) == 10.0


def test_the_start_waits_for_no_store_that_hangs() -> None:
    gate = threading.Event()
    made: list[Moody] = []

    def make() -> Store:
        assert gate.wait(60)
        made.append(Moody())
        return made[-1]

    late = DeferredStore("late", "somewhere", make)
    with stack(late, open_seconds=0.05) as tiers:
        put(tiers, 1)
        assert locate(tiers, 1) == [None] and tiers.counts["dropped"] == 1
        gate.set()
        wait_for(lambda: tiers.caller.is_up(late))
        put(tiers, 2)
        assert locate(tiers, 2) == ["late"] and len(made) == 1


def test_what_is_made_too_late_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, closed = threading.Event(), threading.Event()

    async def close(store: HostStore) -> None:
        closed.set()

    def make() -> Store:
        assert gate.wait(60)
        return Moody()

    monkeypatch.setattr(Moody, "close", close)
    with stack(DeferredStore("late", "somewhere", make), open_seconds=0.05):
        pass
    assert not closed.is_set()
    gate.set()
    assert closed.wait(60)


HANGING = """
import sys
import threading
from pathlib import Path
from tier_entries import ORIGIN, entry
from vlm_serve.cache.tiers import stack
from vlm_serve.cache.tiers.disk import DiskStore
from vlm_serve.cache.tiers.deferred import DeferredStore
stack.CLOSE_SECONDS = 0.1
"""
OPENING = """
late = DeferredStore("late", "somewhere", threading.Event().wait)
stack.TierStack(ORIGIN, [late], open_seconds=0.05).close(1.0)
"""
WRITING = """
begun = threading.Event()
class Hanging(DiskStore):
    def _transaction(self, removed, added):
        begun.set()
        threading.Event().wait()
tiers = stack.TierStack(ORIGIN, [Hanging(Path(sys.argv[1]), 1 << 20)])
tiers.put(entry(1))
assert begun.wait(60)
tiers.close(0.1)
"""


@pytest.mark.parametrize("text", [OPENING, WRITING])
def test_a_process_ends_though_a_store_hangs(text: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGING + text, str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[1], timeout=120, check=True)


def late_disk(folder: Path) -> DeferredStore:
    return DeferredStore("disk", str(folder), partial(DiskStore, folder, 1 << 20))


def fill(folder: Path, *numbers: int) -> None:
    with stack(DiskStore(folder, 1 << 20)) as tiers:
        for number in numbers:
            put(tiers, number)


def test_what_lies_on_a_disk_that_comes_late_is_found(tmp_path: Path) -> None:
    fill(tmp_path / "real", 1, 2)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "mounted")
    disk = late_disk(link)
    with stack(disk) as tiers:
        assert not tiers.caller.is_up(disk) and not tiers.holds(entry(1).id)
        (tmp_path / "real").rename(tmp_path / "mounted")
        wait_for(lambda: tiers.caller.is_up(disk))
        assert tiers.holds(entry(1).id) and get(tiers, 2) == entry(2)


def test_a_flush_counts_for_a_disk_that_comes_later(tmp_path: Path) -> None:
    fill(tmp_path / "real", 1)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "mounted")
    disk = late_disk(link)
    with stack(disk) as tiers:
        tiers.clear().result(60)
        (tmp_path / "real").rename(tmp_path / "mounted")
        wait_for(lambda: tiers.caller.is_up(disk))
        assert not tiers.holds(entry(1).id) and locate(tiers, 1) == [None]
        put(tiers, 3)
        assert locate(tiers, 3) == ["disk"]


def test_a_database_that_another_one_has_locked_is_used_when_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 1)
    connect = sqlite3.connect
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        impatient = lambda *given, **options: connect(*given, **{**options, "timeout": 0.01})  # noqa: E731
        monkeypatch.setattr(sqlite3, "connect", impatient)
        disk = late_disk(tmp_path)
        with stack(disk) as tiers:
            assert not tiers.caller.is_up(disk)
            other.close()
            wait_for(lambda: tiers.caller.is_up(disk))
            assert get(tiers, 1) == entry(1)


def test_a_damaged_file_in_a_folder_that_is_gone_is_left_alone_until_it_can_be_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, moved = tmp_path / "folder", tmp_path / "moved"
    disk = DeferredStore("disk", str(folder), partial(DiskStore, folder, 1 << 24))
    with caplog.at_level(logging.INFO), stack(disk) as tiers:
        for number in range(50):
            tiers.put(entry(number, size=100_000))  # more than SQLite keeps in memory
        assert tiers.drain(60)
        folder.rename(moved)
        folder.touch()
        for path in moved.iterdir():
            if not path.name.endswith("-shm"):
                with path.open("r+b") as file:
                    file.write(b"\xff" * path.stat().st_size)
        assert get(tiers, 0) is None and not tiers.caller.is_up(disk)
        put(tiers, 60)
        wait_for(lambda: "tries again" in caplog.text)
        failed = [each for each in caplog.records if "it is paused" in each.getMessage()]
        assert len(failed) == 1 and not any(each.exc_info for each in caplog.records)
        folder.unlink()
        moved.rename(folder)
        wait_for(lambda: tiers.caller.is_up(disk))
        put(tiers, 61)
        assert get(tiers, 61) == entry(61) and get(tiers, 0) is None


def test_nobody_else_locks_the_file_of_a_running_server(tmp_path: Path) -> None:
    with stack(late_disk(tmp_path)) as tiers:
        put(tiers, 1)
        program = (
            "import sqlite3, sys\n"
            "sqlite3.connect(sys.argv[1], timeout=0.1).execute('BEGIN EXCLUSIVE')"
        )
        line = [sys.executable, "-c", program, str(tmp_path / FILE_NAME)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert "locked" in done.stderr
        put(tiers, 2)
        assert get(tiers, 1) == entry(1) and get(tiers, 2) == entry(2)
        assert not tiers.counts["failed_disk"]


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("length", [0, 40, 5000])
def test_files_that_are_cut_while_they_are_used_cost_entries(
    tmp_path: Path, suffix: str, length: int
) -> None:
    path = tmp_path / (FILE_NAME + suffix)
    disk = late_disk(tmp_path)
    with stack(disk) as tiers:
        for number in range(60):
            tiers.put(entry(number, size=100_000))  # more than SQLite keeps in memory
        assert tiers.drain(60)
        assert path.exists() == (suffix != "-shm"), "a mapped file could end the process"
        if path.exists():
            os.truncate(path, length)
        for number in range(60):
            assert get(tiers, number) in (entry(number, size=100_000), None)
            wait_for(lambda: tiers.caller.is_up(disk))
        put(tiers, 70)
        wait_for(lambda: tiers.caller.is_up(disk))
        put(tiers, 71)
        assert get(tiers, 71) == entry(71)


def test_a_request_waits_for_a_store_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the store's own limit, which is that of writes too."""
    monkeypatch.setattr("vlm_serve.cache.tiers.store_calls.READ_LIMIT", 0.1)
    hanging = threading.Event()

    class Slow(HostStore):
        async def get(self, ids: Collection[EntryId]) -> dict[EntryId, Any]:
            await asyncio.to_thread(hanging.wait, 30)
            return {}

    with stack(Slow(1 << 20), rest=60) as tiers:
        put(tiers, 1)
        begin = time.monotonic()
        assert get(tiers, 1) is None
        assert time.monotonic() - begin < 20
        hanging.set()


class Refusing(sqlite3.Connection):
    """Cannot remove everything, as SQLite says it with its result code."""

    code: int | None = None

    def execute(self, sql: str, *given: Any) -> sqlite3.Cursor:
        if self.code is not None and sql == "DELETE FROM entries":
            error = sqlite3.OperationalError("injected")
            error.sqlite_errorcode = self.code
            raise error
        return super().execute(sql, *given)


@pytest.mark.parametrize("code", ["SQLITE_FULL", "SQLITE_CORRUPT", "SQLITE_BUSY", "SQLITE_IOERR"])
def test_a_flush_that_the_disk_refuses_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Refusing))
    disk = late_disk(tmp_path)
    with stack(disk) as tiers:
        put(tiers, 1)
        monkeypatch.setattr(Refusing, "code", getattr(sqlite3, code))
        tiers.clear().result(60)
        assert locate(tiers, 1) == [None] and get(tiers, 1) is None
        monkeypatch.setattr(Refusing, "code", None)
        wait_for(lambda: tiers.caller.is_up(disk))
        assert locate(tiers, 1) == [None] and not tiers.holds(entry(1).id)
        put(tiers, 2)
        assert get(tiers, 2) == entry(2)
    with stack(late_disk(tmp_path)) as tiers:
        assert locate(tiers, 1, 2) == [None, "disk"]


def test_what_others_say_is_logged_as_one_short_line() -> None:
    line = line_of(OSError("\x1b[31m\nred\x00 " + "x" * 10_000))
    assert line.startswith("?[31m red? xxx") and len(line) == 300
    assert line_of(TimeoutError()) == "it does not answer"
    assert line_of(OSError()) == "OSError"
