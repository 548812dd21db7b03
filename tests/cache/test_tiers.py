"""The lower tiers: what is stored, that damage is noticed, that bounds hold."""

from __future__ import annotations

import random
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vlm_serve.cache.tiers.disk import FILE_NAME, DiskStore
from vlm_serve.cache.tiers.entry import (
    BadEntryError,
    Entry,
    EntryId,
    Kind,
    Origin,
    Sealed,
    seal,
    unseal,
)
from vlm_serve.cache.tiers.host import HostStore
from vlm_serve.cache.tiers.stack import TierStack

ORIGIN = Origin(bytes(range(32)))


def entry(number: int, size: int = 1000, kind: Kind = Kind.KV) -> Entry:
    payload = random.Random(number).randbytes(size)
    return Entry(EntryId(kind, number.to_bytes(32, "big")), 16, True, "float32[4,2]", payload)


def stack(folder: Path | None = None, *, host: int = 0, disk: int = 1 << 20) -> TierStack:
    store = DiskStore(folder, disk) if folder is not None else None
    return TierStack(ORIGIN, host_bytes=host, disk=store, background=False)


# What is stored


def test_an_entry_comes_back_as_it_was() -> None:
    for kind in Kind:
        original = entry(1, kind=kind)
        assert unseal(seal(original, ORIGIN), original.id, ORIGIN) == original
        assert seal(original, ORIGIN).num_bytes == original.num_bytes


def test_every_flipped_bit_is_noticed() -> None:
    original = entry(1, size=40)
    sealed = seal(original, ORIGIN)
    data = sealed.header + sealed.payload
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        header = bytes(changed[: len(sealed.header)])
        with pytest.raises(BadEntryError):
            unseal(Sealed(header, bytes(changed[len(header) :])), original.id, ORIGIN)


@pytest.mark.parametrize("length", [0, 3, 80, 119])
def test_a_header_that_is_cut_off_is_noticed(length: int) -> None:
    original = entry(1)
    sealed = seal(original, ORIGIN)
    with pytest.raises(BadEntryError):
        unseal(Sealed(sealed.header[:length], sealed.payload), original.id, ORIGIN)
    with pytest.raises(BadEntryError):
        unseal(Sealed(sealed.header, sealed.payload[:length]), original.id, ORIGIN)


def test_another_model_rank_kind_key_or_version_is_noticed() -> None:
    original = entry(1)
    sealed = seal(original, ORIGIN)
    for asked, origin in [
        (original.id, Origin(bytes(32))),
        (original.id, Origin(ORIGIN.model, rank=1)),
        (EntryId(Kind.STATE, original.id.key), ORIGIN),
        (entry(2).id, ORIGIN),
    ]:
        with pytest.raises(BadEntryError):
            unseal(sealed, asked, origin)
    newer = bytearray(sealed.header)
    struct.pack_into("<H", newer, 4, 2)
    with pytest.raises(BadEntryError, match="format version 2"):
        unseal(Sealed(bytes(newer), sealed.payload), original.id, ORIGIN)


# Host memory


def test_the_host_tier_is_bounded_and_drops_what_was_not_used() -> None:
    sealed = [seal(entry(number), ORIGIN) for number in range(5)]
    ids = [entry(number).id for number in range(5)]
    host = HostStore(3 * sealed[0].num_bytes)
    for number in range(3):
        assert host.put(ids[number], sealed[number]) == []
    assert host.get(ids[0]) == sealed[0]
    assert [gone for gone, _ in host.put(ids[3], sealed[3])] == [ids[1]]
    assert list(host) == [ids[2], ids[0], ids[3]]
    assert host.num_bytes == 3 * sealed[0].num_bytes == host.max_bytes
    assert host.put(ids[3], sealed[3]) == [], "storing an entry again takes no more room"
    big = seal(entry(9, size=10_000), ORIGIN)
    assert host.put(entry(9).id, big) == [(entry(9).id, big)]
    assert len(host) == 3


def test_overflow_of_the_host_tier_goes_to_the_disk(tmp_path: Path) -> None:
    tiers = stack(tmp_path, host=2 * entry(0).num_bytes)
    for number in range(5):
        tiers.put(entry(number))
    assert [tiers.locate(entry(number).id) for number in range(5)] == ["disk"] * 3 + ["host"] * 2
    for number in range(5):
        found = tiers.get(entry(number).id)
        assert found is not None and found.entry == entry(number)
    assert tiers.counts["hit_disk"] == 3 and tiers.counts["hit_host"] == 2
    tiers.close()


def test_without_a_disk_overflow_is_gone() -> None:
    tiers = stack(host=2 * entry(0).num_bytes)
    for number in range(3):
        tiers.put(entry(number))
    assert tiers.locate(entry(0).id) is None and tiers.get(entry(0).id) is None
    assert tiers.counts["evicted_host"] == 1
    tiers.close()


# Disk


def test_the_disk_tier_survives_a_restart(tmp_path: Path) -> None:
    tiers = stack(tmp_path)
    for number in range(4):
        tiers.put(entry(number))
    tiers.close()
    again = stack(tmp_path)
    for number in range(4):
        found = again.get(entry(number).id)
        assert found is not None and found.entry == entry(number) and found.tier == "disk"
    again.close()


def test_the_host_tier_sinks_to_the_disk_at_shutdown(tmp_path: Path) -> None:
    tiers = stack(tmp_path, host=1 << 20)
    tiers.put(entry(1))
    tiers.sink()
    tiers.put(entry(2))
    tiers.close()
    again = stack(tmp_path)
    assert again.get(entry(1).id) is not None and again.get(entry(2).id) is not None
    again.close()


def test_the_disk_tier_is_bounded(tmp_path: Path) -> None:
    bound = 64 * 8192
    store = DiskStore(tmp_path, bound)
    for number in range(200):
        assert store.write([(entry(number).id, seal(entry(number, 5000), ORIGIN))]) == 1
        assert store.num_bytes <= bound
    assert len(store) == 64 and store.evictions == 136
    assert entry(199).id in store and entry(0).id not in store
    assert (tmp_path / FILE_NAME).stat().st_size < bound + (1 << 17)
    assert store.write([(entry(1).id, seal(entry(1, bound), ORIGIN))]) == 0
    store.close()
    smaller = DiskStore(tmp_path, bound // 4)
    assert len(smaller) == 16 and smaller.num_bytes <= bound // 4
    assert smaller.read(entry(199).id) is not None
    smaller.close()
    assert (tmp_path / FILE_NAME).stat().st_size < bound // 4 + (1 << 17)


def test_what_was_read_last_goes_last(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 3 * 8192)
    for number in range(3):
        store.write([(entry(number).id, seal(entry(number), ORIGIN))])
    store.read(entry(0).id)
    store.write([(entry(3).id, seal(entry(3), ORIGIN))])
    assert entry(0).id in store and entry(1).id not in store
    store.close()


def test_a_flipped_bit_on_disk_is_a_counted_miss(tmp_path: Path) -> None:
    tiers = stack(tmp_path)
    tiers.put(entry(1))
    tiers.put(entry(2))
    tiers.close()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute(
            "UPDATE entries SET payload = zeroblob(1000) WHERE key = ?", (entry(1).id.key,)
        )
    connection.close()
    again = stack(tmp_path)
    assert again.get(entry(1).id) is None
    assert again.counts["bad"] == 1
    assert again.locate(entry(1).id) is None, "a bad entry is removed"
    assert again.get(entry(2).id) is not None
    again.close()


@pytest.mark.parametrize("seed", range(24))
def test_a_damaged_file_costs_entries_and_nothing_else(tmp_path: Path, seed: int) -> None:
    tiers = stack(tmp_path)
    for number in range(30):
        tiers.put(entry(number))
    tiers.close()
    rng = random.Random(seed)
    path = tmp_path / FILE_NAME
    data = bytearray(path.read_bytes())
    if seed % 3 == 0:
        data = data[: rng.randrange(len(data))]
    for _ in range(200 if data else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    again = stack(tmp_path)
    for number in range(30):
        found = again.get(entry(number).id)
        assert found is None or found.entry == entry(number)
    for number in range(30, 40):
        again.put(entry(number))
    again.put(entry(50))
    again.close()
    last = stack(tmp_path)
    for number in range(51):
        found = last.get(entry(number).id)
        assert found is None or found.entry == entry(number)
    last.close()


def test_a_file_that_is_no_database_is_replaced(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"something else entirely" * 1000)
    store = DiskStore(tmp_path, 1 << 20)
    assert store.errors == 1 and len(store) == 0
    assert store.write([(entry(1).id, seal(entry(1), ORIGIN))]) == 1
    store.close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        DiskStore(tmp_path / "file" / "folder", 1 << 20)
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(OSError, match=FILE_NAME):
        DiskStore(tmp_path, 1 << 20)


def test_a_full_disk_is_counted_and_costs_the_batch(tmp_path: Path) -> None:
    tiers = stack(tmp_path)
    assert tiers.disk is not None
    tiers.put(entry(1))
    connection = tiers.disk._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()
    tiers.put(entry(2, size=50_000))
    assert tiers.disk.errors == 1 and tiers.counts["dropped"] == 1
    assert tiers.locate(entry(2).id) is None
    assert tiers.get(entry(1).id) is not None
    connection.execute(f"PRAGMA max_page_count = {pages + 100}").fetchall()
    tiers.put(entry(2, size=50_000))
    assert tiers.get(entry(2).id) is not None
    tiers.close()


# The thread


def test_an_entry_is_served_before_it_is_filed(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, 1 << 20)
    gate = threading.Event()
    write = disk.write
    disk.write = lambda batch: gate.wait(30) and write(batch)  # type: ignore[method-assign]
    tiers = TierStack(ORIGIN, host_bytes=0, disk=disk, queue_bytes=3 * entry(0).num_bytes)
    for number in range(5):
        tiers.put(entry(number))
    assert [tiers.locate(entry(number).id) for number in range(5)] == ["host"] * 3 + [None] * 2
    assert tiers.counts["dropped"] == 2, "the queue is bounded"
    found = tiers.get(entry(0).id)
    assert found is not None and found.entry == entry(0)
    gate.set()
    assert tiers.drain(30)
    assert [tiers.locate(entry(number).id) for number in range(3)] == ["disk"] * 3
    tiers.clear()
    assert tiers.locate(entry(0).id) is None and len(disk) == 0
    tiers.close()


WRITER = """
import sys
from pathlib import Path
from test_tiers import ORIGIN, entry
from vlm_serve.cache.tiers.disk import DiskStore
from vlm_serve.cache.tiers.entry import seal
store = DiskStore(Path(sys.argv[1]), 1 << 30)
for number in range(10**6):
    batch = [entry(3 * number + i, size=20_000) for i in range(3)]
    assert store.write([(each.id, seal(each, ORIGIN)) for each in batch]) == 3
    print(3 * number + 2, flush=True)
"""


@pytest.mark.parametrize("batches", [1, 7, 40])
def test_a_killed_process_loses_the_batch_under_way_at_most(tmp_path: Path, batches: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    ) as writer:
        assert writer.stdout is not None
        last = -1
        for _ in range(batches):
            last = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        last = max([last, *(int(line) for line in writer.stdout.readlines())])
    tiers = stack(tmp_path, disk=1 << 30)
    assert tiers.disk is not None
    assert last + 1 <= len(tiers.disk) <= last + 4
    for number in range(last + 1):
        found = tiers.get(entry(number).id)
        assert found is not None and found.entry == entry(number, size=20_000)
    assert not tiers.counts["bad"] and not tiers.disk.errors
    tiers.put(entry(10**7))
    assert tiers.get(entry(10**7).id) is not None
    tiers.close()
