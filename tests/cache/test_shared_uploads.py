"""Media in the store that servers share: what is known of uploads lies in manifests alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_server import StoreServer, running
from shared_stores import kv, sides
from tier_entries import ORIGIN

from vlm_serve.cache.tiers.entry import Entry, Kind
from vlm_serve.cache.tiers.shared import MAX_OTHER_BYTES
from vlm_serve.cache.tiers.shared_format import MAX_RECORD_BYTES


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with running(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def server(shared: StoreServer) -> StoreServer:
    shared.client.flushall()
    shared.client.config_set("maxmemory", 0)
    return shared


def upload(number: int, payload: bytes = b"hash of a picture" * 9) -> Entry:
    return Entry(ORIGIN.id(Kind.UPLOAD, bytes([number]) * 32), 1, True, "upload 1", payload)


def num_calls(server: StoreServer) -> int:
    return int(server.client.info("commandstats")["cmdstat_getrange"]["calls"])


def test_a_record_is_read_with_its_manifest_and_tells_nothing(server: StoreServer) -> None:
    with sides(server) as (first, second):
        first.share(upload(1), upload(2))
        stored = [value for key in server.names() if (value := server.client.get(key)) is not None]
        assert not any(b"hash of a picture" in bytes(value) for value in stored)  # type: ignore[arg-type]
        assert len(stored) == 2 + 2 + 1, "manifests, claims, the epoch"
        before = num_calls(server)
        ids = [upload(1).id, upload(3).id]
        assert second.run(second.stack.get(ids)) == {upload(1).id: upload(1)}
        assert num_calls(server) == before + 2
        assert (second["hits"], second["misses"]) == (1, 1)


def test_the_longest_record_is_shared_and_a_longer_one_is_not(server: StoreServer) -> None:
    with sides(server) as (first, second):
        longest, longer = (upload(i, bytes(MAX_RECORD_BYTES + i)) for i in (0, 1))
        claimed = first.share(longest, longer)
        assert len(claimed) == 2 and first["written"] == 1
        assert first.run(first.store.put(first.sealed(longer))) == first.sealed(longer)
        assert second.read(longest, longer) == 1 and second["bad"] == 0


@pytest.mark.parametrize("how", ["one bit", "cut off", "longer", "another's", "noise", "huge"])
def test_a_bad_record_is_a_counted_miss_and_is_replaced_at_once(
    server: StoreServer, how: str
) -> None:
    """Although its first writer's claim holds: replacing is claimed by itself."""
    with sides(server) as (first, second):
        first.share(upload(1), upload(2))
        key = first.name(upload(1))
        value = server.client.get(key)
        assert isinstance(value, bytes)
        other = server.client.get(first.name(upload(2)))
        assert isinstance(other, bytes)
        changed = {
            "one bit": value[:-1] + bytes([value[-1] ^ 1]),
            "cut off": value[:-1],
            "longer": value + b"\0",
            "another's": other,
            "noise": bytes(len(value)),
            "huge": bytes(16 << 20),
        }
        server.client.set(key, changed[how])
        assert second.read(upload(1)) == 0 and second["bad"] == 1
        assert second.share(upload(1)) == {upload(1).id}
        assert second.read(upload(1)) == first.read(upload(1)) == 1


def test_a_record_in_chunks_and_a_block_in_its_manifest_are_not_believed(
    server: StoreServer,
) -> None:
    """Even from who has the key."""
    with sides(server) as (first, second):
        first.share(*kv(9))
        (block,) = kv(1)
        for each, inside in ((upload(1), b""), (block, bytes(block.payload))):
            (sealed,) = first.sealed(each).values()
            manifest, _ = first.keys.pack(first.name(each), sealed.header, inside)
            server.client.set(first.name(each), manifest)
            assert second.read(each) == 0
        assert second["bad"] == 2


def test_embeddings_that_are_said_to_be_huge_are_not_read(server: StoreServer) -> None:
    """Without a key everybody who reaches the store can say so."""
    with sides(server, {"secret": b""}) as (side,):
        side.share(*kv(2))
        target = Entry(ORIGIN.id(Kind.EMBEDDINGS, bytes(32)), 1, True, "", b"")
        (sealed,) = side.sealed(target).values()
        size = (MAX_OTHER_BYTES + 1).to_bytes(8, "little")
        forged = sealed.header[:-40] + size + sealed.header[-32:]
        server.client.set(side.name(target), side.keys.pack(side.name(target), forged)[0])
        before = num_calls(server)
        assert side.read(target) == 0 and side["bad"] == 1
        assert num_calls(server) == before + 1, "the manifest alone"


def test_what_is_intact_and_wrong_is_overwritten(server: StoreServer) -> None:
    with sides(server) as (first, second):
        wrong, right = upload(1, b"wrong"), upload(1, b"right")
        first.share(wrong)
        assert second.run(second.stack.get([wrong.id])) == {wrong.id: wrong}
        second.stack.share = lambda entry: None
        second.run(second.stack.replace(right))
        assert second["bad"] == 1
        assert second.share(right) == {right.id}
        with sides(server, {}) as (third,):
            assert third.run(third.stack.get([right.id])) == {right.id: right}


def test_a_full_store_that_has_lost_the_epoch_is_still_read(server: StoreServer) -> None:
    with sides(server, {}, {}, {}) as (first, second, late):
        first.share(*kv(1))
        assert second.read(*kv(1)) == 1
        server.client.delete(first.keys.epoch_name)
        server.client.config_set("maxmemory", 1)
        for side in (first, second):
            assert side.read(*kv(1)) == 1 and side["refused"] == 1
        assert late.read(*kv(1)) == 0, "who does not know the epoch finds nothing"
        assert all(side["failed_shared"] == side["bad"] == 0 for side in (first, second, late))
        server.client.config_set("maxmemory", 0)
        assert first.read(*kv(1)) == 1, "and stores the epoch again"
        assert second.read(*kv(1)) == late.read(*kv(1)) == 1
