"""The tier that servers share, on a real store: what is believed, what is written, what fails."""

from __future__ import annotations

import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from cache_texts import Text
from cache_world import make_world
from redis_server import EXECUTABLES, StoreServer, running
from shared_stores import SECRET, SIZE, Damage, kv, sides, state
from tier_entries import ORIGIN, entry

from vlm_serve.cache.tier_fetching import TierFetcher
from vlm_serve.cache.tiers.entry import Entry, Kind, Origin, seal
from vlm_serve.cache.tiers.mark_records import record_beside
from vlm_serve.cache.tiers.shared_format import CHUNK_BYTES, Keyring
from vlm_serve.cache.tiers.transfer import Transfer


@pytest.fixture(scope="module", params=EXECUTABLES)
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StoreServer]:
    with running(tmp_path_factory.mktemp("store"), executable=request.param) as server:
        yield server


@pytest.fixture
def server(shared: StoreServer) -> StoreServer:
    shared.client.flushall()
    shared.client.config_set("maxmemory", 0)
    return shared


# What is exchanged


def test_entries_of_all_sizes_come_back_to_another_server(server: StoreServer) -> None:
    entries = [*kv(1, 2, 3), state(), entry(5, 0, Kind.EXPERTS)]
    with sides(server) as (first, second):
        assert len(first.share(*entries)) == 5
        assert second.read(*entries) == 5
        assert second["hits"] == second["hit_shared"] == 5
        assert first["written"] == 5 and first["written_bytes"] == second["read_bytes"]
    sizes = [server.client.strlen(key) for key in server.names()]
    assert max(map(int, sizes)) == CHUNK_BYTES
    assert len(sizes) == 5 + 3 + 2 + 5 + 1, "manifests, chunks, claims, the epoch"


def test_every_key_expires_and_what_is_used_again_begins_anew(server: StoreServer) -> None:
    with sides(server) as (first, second):
        first.share(*kv(1), state())
        assert all(int(server.client.ttl(key)) > 0 for key in server.names())
        for key in (first.name(state()), first.chunk(server, state(), 1)):
            server.client.expire(key, 100)
        assert second.share(state()) == set(), "it is there"
        assert int(server.client.ttl(first.name(state()))) > 900
        assert int(server.client.ttl(first.chunk(server, state(), 1))) > 900


def test_without_a_snapshot_nothing_else_is_looked_up(server: StoreServer) -> None:
    """Nor is more than one call made. A record of marks lets tails of its lengths be looked up."""
    world, transfer = make_world(min_snapshot_gain=1), cast(Transfer, None)
    text, marked = (Text(range(10, 50), marks=marks) for marks in ((), (30,)))
    blocks = [
        replace(each, id=ORIGIN.id(Kind.KV, key))
        for each, key in zip(kv(*range(10)), text.keys.block_keys, strict=True)
    ]
    world.serve(marked)
    node = next(node for node in world.cache.nodes() if node.end == 30)
    record = record_beside(node, world.cache.ledger.marks, ORIGIN)
    tail = replace(kv(9)[0], id=ORIGIN.id(Kind.KV, marked.keys.tails[30]))
    states = [
        replace(state(), id=ORIGIN.id(Kind.STATE, key))
        for key in (text.keys.block_keys[4], marked.keys.tails[30])
    ]
    world.cache.flush()
    match = world.match(text)
    assert record is not None and 30 not in text.keys.cuts

    def calls() -> Counter[str]:
        stats = server.client.info("commandstats")
        return Counter(
            {name: int(stats[f"cmdstat_{name}"]["calls"]) for name in ("get", "getrange")}
        )

    with sides(server) as (first, second):
        fetcher = TierFetcher(world.cache, second.stack, transfer)

        def looked_up() -> tuple[int, int, int]:
            """The boundary, with how many calls and entries."""
            before, future = calls(), fetcher.look_up(text.keys, match, limit=39)
            deeper = future.result(60) if future is not None else None
            made = calls() - before
            return deeper.boundary if deeper is not None else 0, made["get"], made["getrange"]

        first.share(*blocks)
        second.located(state())  # which reads the epoch
        assert looked_up() == (0, 1, 9 + 9), "states and records"
        first.share(states[0])
        assert looked_up() == (20, 2, 18 + 9)
        first.share(record)
        assert looked_up() == (20, 2, 18 + 9 + 2)
        first.share(states[1], tail)
        assert looked_up() == (30, 2, 18 + 9 + 2)
    assert 30 not in text.keys.cuts, "a look-up changes nothing"


def test_other_models_ranks_and_keys_find_nothing(server: StoreServer) -> None:
    others: list[dict[str, object]] = [
        {"origin": Origin(bytes(32))},
        {"origin": Origin(ORIGIN.model, world=2)},
        {"secret": b"another key, of more than 32 bytes"},
        {"secret": b""},
    ]
    with sides(server, {}, *others) as (first, *rest):
        first.share(*kv(1, 2))
        for side in rest:
            own = [
                Entry(side.origin.id(Kind.KV, e.id.key), 16, True, "", e.payload) for e in kv(1, 2)
            ]
            assert side.located(*own) == 0 and side["bad"] == 0
            side.share(*own)
        assert first.read(*kv(1, 2)) == 2 and first["bad"] == 0


# What is written


def test_of_many_that_miss_one_entry_one_writes_it(server: StoreServer) -> None:
    with sides(server, *[{} for _ in range(6)]) as servers:
        barrier = threading.Barrier(len(servers))

        def share(index: int) -> int:
            barrier.wait()
            return len(servers[index].share(state(), *kv(1, 2)))

        with ThreadPoolExecutor(len(servers)) as pool:
            claimed = list(pool.map(share, range(len(servers))))
        assert sum(claimed) == 3
        assert sum(side["written"] for side in servers) == 3
        assert sum(side["skipped"] for side in servers) == 3 * (len(servers) - 1)
        assert all(side.read(state(), *kv(1, 2)) == 3 for side in servers)


def test_a_full_store_is_not_written_to_and_still_read(server: StoreServer) -> None:
    with sides(server) as (first, second):
        first.share(*kv(1))
        server.client.config_set("maxmemory", 1)  # and it evicts nothing
        first.share(*kv(2))
        assert first["refused"] == 1
        commands = int(server.client.info("stats")["total_commands_processed"])
        first.share(*kv(3, 4, 5))
        asked = int(server.client.info("stats")["total_commands_processed"]) - commands
        assert asked == 1, "nothing but this question"
        assert first.read(*kv(1)) == second.read(*kv(1)) == 1
        server.client.config_set("maxmemory", 0)
        first.store._writes_again = 0.0
        assert len(first.share(*kv(2))) == 1 and second.read(*kv(2)) == 1


# A flush


def test_a_flush_is_a_new_epoch_for_everybody_and_deletes_nothing(server: StoreServer) -> None:
    with sides(server) as (first, second):
        first.share(*kv(1, 2))
        assert second.read(*kv(1, 2)) == 2
        before = set(server.names())
        second.stack.clear().result(60)
        assert first.read(*kv(1, 2)) == second.read(*kv(1, 2)) == 0
        assert before <= set(server.names())
        assert len(first.share(*kv(1))) == 1
        assert second.read(*kv(1)) == 1
    with sides(server, {}) as (third,):
        assert third.read(*kv(1, 2)) == 1, "one that starts later takes the epoch over"


def test_a_flush_that_the_store_was_not_told_of_counts_all_the_same(tmp_path: Path) -> None:
    with running(tmp_path) as server, sides(server, {"limit": 1.5}) as (side,):
        side.share(*kv(1))
        server.freeze()
        side.stack.clear().result(60)
        assert side["failed_shared"] == 1
        server.thaw()
        assert side.read(*kv(1)) == 0 and side["failed_shared"] == 1


def test_what_was_flushed_does_not_come_back_when_the_epoch_is_lost(server: StoreServer) -> None:
    with sides(server) as (first, second):
        first.share(*kv(1))
        first.stack.clear().result(60)
        first.share(*kv(2))
        server.client.delete(first.keys.epoch_name)
        assert first.read(*kv(1, 2)) == 1, "it remembers its epoch"
        assert second.read(*kv(1, 2)) == 1, "and has told the store"
        server.client.delete(first.keys.epoch_name)
    with sides(server, {}) as (third,):
        assert third.read(*kv(1, 2)) == 0, "nobody knew the last one"


# What is not believed

DAMAGES: dict[str, Damage] = {
    "one bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "first bit": lambda data: bytes([data[0] ^ 128]) + data[1:],
    "cut off": lambda data: data[:-1],
    "empty": lambda data: b"",
    "longer": lambda data: b"x" + data,
    "huge": lambda data: bytes(16 << 20),
}


@pytest.mark.parametrize("part", ["manifest", "chunk"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_a_counted_miss_and_is_replaced(
    server: StoreServer, part: str, damage: str
) -> None:
    with sides(server) as (first, second):
        first.share(*kv(1), state())
        for each in (*kv(1), state()):
            key = first.name(each) if part == "manifest" else first.chunk(server, each)
            value = server.client.get(key)
            assert isinstance(value, bytes)
            server.client.set(key, DAMAGES[damage](value), keepttl=True)
        assert second.read(*kv(1)) == 0
        assert second.read(state()) == 0
        counted = second["bad"] + second["incomplete"]
        # An emptied manifest is none.
        assert counted == (0 if (part, damage) == ("manifest", "empty") else 2)
        server.client.delete(*(first.keys.claim_name(first.name(e)) for e in (*kv(1), state())))
        second.share(*kv(1), state())
        assert second.read(*kv(1), state()) == first.read(*kv(1), state()) == 2


def test_a_missing_piece_is_a_miss(server: StoreServer) -> None:
    with sides(server) as (first, second):
        first.share(state())
        server.client.delete(first.chunk(server, state(), 1))
        assert second.read(state()) == 0 and second["incomplete"] == 1
        assert second.read(state()) == 0 and second["incomplete"] == 1, "not asked for again"


def test_another_type_under_a_name_is_a_miss(server: StoreServer) -> None:
    with sides(server) as (first, second):
        first.share(*kv(1, 2))
        server.client.delete(first.name(kv(1)[0]))
        server.client.rpush(first.name(kv(1)[0]), b"not", b"a value")
        assert second.read(*kv(1, 2)) == 1 and second["bad"] == 1


def test_swapped_entries_are_misses_and_a_replayed_one_is_harmless(server: StoreServer) -> None:
    with sides(server) as (first, second):
        one, other = kv(1, 2)
        first.share(one, other)
        kept = {key: server.client.get(key) for key in server.names()}
        mine, theirs = first.name(one), first.name(other)
        server.client.set(mine, kept[theirs])  # type: ignore[arg-type]
        server.client.set(theirs, kept[mine])  # type: ignore[arg-type]
        assert second.read(one, other) == 0 and second["bad"] == 2
        server.client.flushall()
        for key, value in kept.items():
            server.client.set(key, value)  # type: ignore[arg-type]
    with sides(server, {}) as (third,):
        assert third.read(one, other) == 2, "under its own name it is what it was"


def test_without_the_key_nobody_can_forge(server: StoreServer) -> None:
    """Even who knows the names: another server's are in the store for all to see."""
    with sides(server) as (first, second):
        target = kv(1)[0]
        first.share(target)
        forged = Entry(target.id, 16, True, "float32[4,2]", bytes(SIZE))
        for secret in (b"", b"guess" * 8):
            manifest, _ = Keyring(secret, ORIGIN).pack(
                first.name(target), seal(forged, ORIGIN).header
            )
            server.client.set(first.name(target), manifest)
            assert second.read(target) == 0
        assert second["bad"] == 2
        record = server.client.get(first.keys.epoch_name)
        server.client.set(first.keys.epoch_name, bytes(len(record)))  # type: ignore[arg-type]
        second.share(*kv(2))
        assert first.read(*kv(2)) == 1, "nor move the epoch"


def test_names_and_manifests_tell_nothing_to_who_has_no_key(server: StoreServer) -> None:
    with sides(server) as (first, _):
        target = kv(1)[0]
        first.share(target)
        everything = b"".join(
            key + bytes(value)  # type: ignore[arg-type]
            for key in server.names()
            if (value := server.client.get(key)) is not None and len(bytes(value)) != SIZE  # type: ignore[arg-type]
        )
        header = seal(target, ORIGIN).header
        for secret in (target.id.key, ORIGIN.model, b"float32", header[-32:], SECRET):
            assert secret not in everything and secret.hex().encode() not in everything


def test_lengths_of_another_layout_are_not_read(server: StoreServer) -> None:
    """With the key, too, or without there being one: nothing is allocated for them."""
    with sides(server, {"secret": b""}) as (side,):
        target = kv(1)[0]
        side.share(*kv(2))
        for size in (SIZE - 1, SIZE + 1, 300 << 20):
            header = seal(Entry(target.id, 16, True, "", b""), ORIGIN).header
            forged = header[:-40] + size.to_bytes(8, "little") + header[-32:]
            server.client.set(side.name(target), side.keys.pack(side.name(target), forged)[0])
            before = int(server.client.info("commandstats")["cmdstat_getrange"]["calls"])
            assert side.read(target) == 0
            calls = int(server.client.info("commandstats")["cmdstat_getrange"]["calls"])
            assert calls == before + 1, "the manifest alone"
        assert side["bad"] == 3


# A store that fails


def test_a_frozen_store_costs_its_limit_once_and_comes_back(tmp_path: Path) -> None:
    with running(tmp_path) as server, sides(server, {"rest": 600.0}) as (side,):
        side.share(*kv(1))
        server.freeze()
        side.store.time_limit = 1.0
        assert side.read(*kv(1)) == 0
        assert side["failed_shared"] == side["opened_shared"] == 1
        assert side.read(*kv(1)) == 0 and side["failed_shared"] == 1 and side["skipped_shared"]
        server.thaw()
        side.store.time_limit = 20.0
        side.stack.caller._breakers[side.store]._open_until = 0.0  # it has rested
        assert side.read(*kv(1)) == 1 and side["failed_shared"] == 1


def test_look_up_and_reading_share_one_limit(tmp_path: Path) -> None:
    with running(tmp_path) as server, sides(server, {"limit": 5.0}) as (side,):
        side.share(*kv(1))

        async def ask() -> int:
            loop = side.stack._loop
            since = loop.time() - 5.1
            return len(await side.stack.locate([kv(1)[0].id], since))

        assert side.run(ask()) == 0 and side["skipped_shared"] == 1
        assert side["failed_shared"] == 0, "it has done nothing wrong"
        assert side.read(*kv(1)) == 1


def test_a_store_that_is_killed_or_emptied_is_a_miss_and_recovers(tmp_path: Path) -> None:
    with running(tmp_path) as server, sides(server) as (first, second):
        first.share(*kv(1))
        server.client.flushall()
        assert second.read(*kv(1)) == 0 and second["failed_shared"] == 0
        assert first.read(*kv(1)) == 0
        assert len(first.share(*kv(1))) == 1, "it has noticed that all was lost"
        assert second.read(*kv(1)) == 1
        server.stop()
        assert first.read(*kv(1)) == 0 and first["failed_shared"] == 1
        server.start()
        time.sleep(0.3)
        assert first.read(*kv(1)) == 0 and len(first.share(*kv(1))) == 1
        assert second.read(*kv(1)) == 1


def test_a_server_without_permission_to_read_is_a_failure(server: StoreServer) -> None:
    server.client.acl_setuser("writer", enabled=True, nopass=True, keys="*", commands=["+ping"])
    connection = {"username": "writer", "password": "any"}
    with sides(server, {"connection": connection}) as (side,):
        assert side.read(*kv(1)) == 0 and side["failed_shared"] == 1


def certificates(folder: Path) -> None:
    """A certificate authority of our own and what it has signed for 127.0.0.1.

    From Python 3.13 on certificates need the extensions that RFC 5280 asks for.
    """

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem"),
        *("-days", "2", "-subj", "/CN=test authority"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
    )
    openssl(
        *("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "server.key", "-out", "server.csr"),
        *("-subj", "/CN=127.0.0.1"),
    )
    names = "subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n"
    (folder / "names").write_text(names)
    openssl(
        *("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-days", "2", "-extfile", "names", "-out", "server.pem"),
    )


def test_entries_travel_over_tls(tmp_path: Path) -> None:
    certificates(tmp_path)
    files = ("--tls-cert-file", "server.pem", "--tls-key-file", "server.key")
    with running(
        tmp_path, *files, "--tls-ca-cert-file", "ca.pem", "--tls-auth-clients", "no", tls=True
    ) as server:
        trusted = {"ssl": True, "ssl_ca_certs": str(tmp_path / "ca.pem")}
        untrusted = {"ssl": True}
        with sides(server, {"connection": trusted}, {"connection": untrusted}) as (first, second):
            first.share(*kv(1), state())
            assert first.read(*kv(1), state()) == 2
            assert second.read(*kv(1)) == 0 and second["failed_shared"] == 1
