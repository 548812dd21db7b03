"""The lower tiers: what is stored, that damage is noticed, that bounds hold."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from cache_texts import Text
from cache_world import World, make_world
from tier_entries import ORIGIN, StackInCaller, entry, get, locate, sealed

from vlm_serve.cache.placement import NEAR_END
from vlm_serve.cache.tiers.disk import FILE_NAME, DiskStore
from vlm_serve.cache.tiers.down import TierSaver
from vlm_serve.cache.tiers.entry import (
    FORMAT_VERSION,
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
from vlm_serve.cache.tiers.store import Store


def stack(folder: Path | None = None, *, host: int = 0, disk: int = 1 << 20) -> TierStack:
    stores: list[Store] = [HostStore(host)] if host else []
    if folder is not None:
        stores.append(DiskStore(folder, disk))
    return StackInCaller(ORIGIN, stores)


class _OfWorld:
    """Reads what a world's blocks and rows hold."""

    def __init__(self, world: World) -> None:
        self._world = world

    def read_kv(self, block: int, num_tokens: int) -> bytes:
        return b"".join(self._world.kv[block][:num_tokens])

    def read_state(self, row: int) -> bytes:
        return self._world.rows[row]

    def layout(self, kind: Kind, num_tokens: int) -> str:
        return f"{kind.name} of {num_tokens}"

    def num_bytes(self, kind: Kind, num_tokens: int) -> int | None:
        return None

    def stage(self, entry: Entry) -> None:
        raise NotImplementedError

    def write_kv(self, block: int, staged: object) -> None:
        raise NotImplementedError

    def write_state(self, row: int, staged: object) -> None:
        raise NotImplementedError


# What is stored


@pytest.mark.parametrize("read", [False, True])
def test_a_state_near_the_end_goes_down_only_if_somebody_has_read_it(read: bool) -> None:
    world, tiers = make_world(), stack(host=1 << 20)
    text = Text([*range(10, 27)])
    world.serve(text, snapshots=lambda position: position in (8, 12))
    states = {each.position: each for each in world.cache.ledger.spare_snapshots}
    states[12].kind = NEAR_END
    if read:
        world.serve(Text([*range(10, 22), 5]))
    TierSaver(tiers, _OfWorld(world), world.config, world.cache.ledger.marks).listen(
        world.cache.events
    )
    world.cache._evictor.evict_everything()
    keys = [text.keys.block_keys[depth] for depth in (1, 2)]
    saved = [tiers.holds(ORIGIN.id(Kind.STATE, key)) for key in keys]
    assert saved == [True, read]
    tiers.close()


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
        (original.id, Origin(ORIGIN.model, world=2)),
        (Origin(ORIGIN.model, world=2).id(Kind.KV, original.id.key), Origin(ORIGIN.model, world=2)),
        (EntryId(Kind.STATE, original.id.key), ORIGIN),
        (entry(2).id, ORIGIN),
    ]:
        with pytest.raises(BadEntryError):
            unseal(sealed, asked, origin)
    newer = bytearray(sealed.header)
    struct.pack_into("<H", newer, 4, FORMAT_VERSION + 1)
    with pytest.raises(BadEntryError, match="format version"):
        unseal(Sealed(bytes(newer), sealed.payload), original.id, ORIGIN)


# Host memory


def test_the_host_tier_is_bounded_and_drops_what_was_not_used() -> None:
    ids = [entry(number).id for number in range(5)]
    each = entry(0).num_bytes
    host = HostStore(3 * each)

    async def use() -> None:
        assert await host.put(sealed(0, 1, 2)) == {}
        assert await host.get([ids[0], ids[4]]) == sealed(0)
        assert await host.put(sealed(3)) == sealed(1)
        assert list(host) == [ids[2], ids[0], ids[3]]
        assert host.num_bytes == 3 * each == host.max_bytes
        assert await host.put(sealed(3)) == {}, "storing an entry again takes no more room"
        big = sealed(9, size=10_000)
        assert await host.put(big) == big
        assert len(host) == 3 and await host.contains(ids) == {ids[0], ids[2], ids[3]}

    asyncio.run(use())


def test_overflow_of_the_host_tier_goes_to_the_disk(tmp_path: Path) -> None:
    tiers = stack(tmp_path, host=2 * entry(0).num_bytes)
    for number in range(5):
        tiers.put(entry(number))
    assert locate(tiers, *range(5)) == ["disk"] * 3 + ["host"] * 2
    for number in range(5):
        found = get(tiers, number)
        assert found is not None and found == entry(number)
    assert tiers.counts["hit_disk"] == 3 and tiers.counts["hit_host"] == 2
    tiers.close()


def test_without_a_disk_overflow_is_gone() -> None:
    tiers = stack(host=2 * entry(0).num_bytes)
    for number in range(3):
        tiers.put(entry(number))
    assert locate(tiers, 0) == [None] and get(tiers, 0) is None
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
        found = get(again, number)
        assert found is not None and found == entry(number)
    again.close()


def test_the_host_tier_sinks_to_the_disk_at_shutdown(tmp_path: Path) -> None:
    tiers = stack(tmp_path, host=1 << 20)
    tiers.put(entry(1))
    tiers.sink()
    tiers.put(entry(2))
    tiers.close()
    again = stack(tmp_path)
    assert get(again, 1) is not None and get(again, 2) is not None
    again.close()


def test_the_disk_tier_is_bounded(tmp_path: Path) -> None:
    bound = 64 * 8192
    store = DiskStore(tmp_path, bound)
    for number in range(200):
        assert len(store.write(sealed(number, size=5000))) == (number >= 64)
        assert store.num_bytes <= bound
    assert len(store) == 64 and store.evictions == 136
    assert entry(199).id in store.known() and entry(0).id not in store.known()
    assert (tmp_path / FILE_NAME).stat().st_size < bound + (1 << 17)
    assert store.write(sealed(1, size=bound)) == {entry(1).id}
    store.shut()
    smaller = DiskStore(tmp_path, bound // 4)
    assert len(smaller) == 16 and smaller.num_bytes <= bound // 4
    assert smaller.read([entry(199).id])
    smaller.shut()
    assert (tmp_path / FILE_NAME).stat().st_size < bound // 4 + (1 << 17)


def test_what_was_read_last_goes_last(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 3 * 8192)
    for number in range(3):
        store.write(sealed(number))
    asyncio.run(store.get([entry(0).id]))
    assert store.write(sealed(3)) == {entry(1).id}
    store.shut()


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
    assert get(again, 1) is None
    assert again.counts["bad"] == 1
    assert locate(again, 1) == [None], "a bad entry is removed"
    assert get(again, 2) is not None
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
        found = get(again, number)
        assert found is None or found == entry(number)
    for number in range(30, 40):
        again.put(entry(number))
    again.put(entry(50))
    again.close()
    last = stack(tmp_path)
    for number in range(51):
        found = get(last, number)
        assert found is None or found == entry(number)
    last.close()


def test_a_file_that_is_no_database_is_replaced(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"something else entirely" * 1000)
    store = DiskStore(tmp_path, 1 << 20)
    assert store.errors == 1 and len(store) == 0
    assert store.write(sealed(1)) == set()
    store.shut()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        DiskStore(tmp_path / "file" / "folder", 1 << 20)
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(OSError, match=FILE_NAME):
        DiskStore(tmp_path, 1 << 20)


def test_a_full_disk_is_told_once_and_costs_the_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = DiskStore(tmp_path, 1 << 20)
    tiers = StackInCaller(ORIGIN, [disk])
    tiers.put(entry(1))
    connection = disk._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()
    tiers.put(entry(2, size=50_000))
    tiers.put(entry(2, size=50_000))
    assert disk.errors == 2 == tiers.counts["dropped"]
    (told,) = caplog.messages
    assert told.endswith("disk is full: the cache tier is read, and not written")
    assert locate(tiers, 1, 2) == ["disk", None] and not tiers.holds(entry(2).id)
    assert get(tiers, 1) is not None
    connection.execute(f"PRAGMA max_page_count = {pages + 100}").fetchall()
    tiers.put(entry(2, size=50_000))
    assert get(tiers, 2) is not None
    tiers.close()


def test_parts_of_a_split_model_share_a_file_and_no_entry(tmp_path: Path) -> None:
    origins = [Origin(ORIGIN.model, rank, world) for rank, world in ((0, 1), (0, 2), (1, 2))]
    for index, origin in enumerate(origins):
        tiers = StackInCaller(origin, [DiskStore(tmp_path, 1 << 20)])
        entry_id = origin.id(Kind.KV, bytes(32))
        assert not tiers.holds(entry_id)
        tiers.put(Entry(entry_id, 16, True, "", bytes([index])))
        tiers.close()
    for index, origin in enumerate(origins):
        tiers = StackInCaller(origin, [DiskStore(tmp_path, 1 << 20)])
        entry_id = origin.id(Kind.KV, bytes(32))
        found = tiers.submit(tiers.get([entry_id])).result()
        assert found[entry_id].payload == bytes([index]) and not tiers.counts["bad"]
        tiers.close()


# The thread


def test_an_entry_is_served_before_it_is_filed(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, 1 << 20)
    gate = threading.Event()
    write = disk.write
    disk.write = lambda entries: write(entries) if gate.wait(30) else set()  # type: ignore[method-assign]
    tiers = TierStack(ORIGIN, [disk], queue_bytes=3 * entry(0).num_bytes)
    for number in range(5):
        tiers.put(entry(number))
    assert locate(tiers, *range(5)) == ["host"] * 3 + [None] * 2
    assert tiers.counts["dropped"] == 2, "the queue is bounded"
    found = get(tiers, 0)
    assert found is not None and found == entry(0)
    gate.set()
    assert tiers.drain(30)
    assert locate(tiers, *range(3)) == ["disk"] * 3
    tiers.clear().result()
    assert locate(tiers, 0) == [None] and len(disk) == 0
    tiers.close()


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from tier_entries import ORIGIN, entry
from vlm_serve.cache.tiers.disk import DiskStore
from vlm_serve.cache.tiers.entry import seal
store = DiskStore(Path(sys.argv[1]), 1 << 30)
for number in range(10**6):
    batch = [entry(3 * number + i, size=20_000) for i in range(3)]
    assert not store.write({each.id: seal(each, ORIGIN) for each in batch})
    print(3 * number + 2, flush=True)
"""


@pytest.mark.parametrize("batches", [1, 7, 40])
def test_a_killed_process_loses_the_batch_under_way_at_most(tmp_path: Path, batches: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    ) as writer:
        assert writer.stdout is not None
        last = -1
        for _ in range(batches):
            last = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        last = max([last, *(int(line) for line in writer.stdout.readlines())])
    disk = DiskStore(tmp_path, 1 << 30)
    tiers = StackInCaller(ORIGIN, [disk])
    assert last + 1 <= len(disk) <= last + 4
    for number in range(last + 1):
        found = get(tiers, number)
        assert found is not None and found == entry(number, size=20_000)
    assert not tiers.counts["bad"] and not disk.errors
    tiers.put(entry(10**7))
    assert get(tiers, 10**7) is not None
    tiers.close()


def test_a_wrong_entry_is_replaced_by_a_right_one(tmp_path: Path) -> None:
    """Putting it is not enough: a store keeps what it has."""
    for host, disk in ((0, 1 << 20), (1 << 20, 1 << 20)):
        tiers = TierStack(ORIGIN, [HostStore(host), DiskStore(tmp_path / str(host), disk)])
        wrong, right = entry(1), replace(entry(2), id=entry(1).id)
        tiers.put(wrong)
        assert tiers.drain(10)
        tiers.submit(tiers.replace(right)).result()
        assert tiers.drain(10)
        assert get(tiers, 1) == right
        assert tiers.counts["bad"] == 1
        tiers.close()


def test_only_what_nobody_else_writes_is_known_by_the_books(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiers = stack(host=1 << 20)
    tiers.put(entry(1))
    assert tiers.may_hold(entry(1).id) and not tiers.may_hold(entry(2).id)
    assert not tiers.reaches_others
    monkeypatch.setattr(HostStore, "private", False)
    assert tiers.may_hold(entry(2).id) and tiers.reaches_others
    tiers.close()
    lasting = stack(tmp_path)
    assert lasting.reaches_others
    lasting.close()
