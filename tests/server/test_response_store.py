"""What the store of responses holds, against a plain recount."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

import pytest

from vlm_serve.server import response_store
from vlm_serve.server.http.auth import Owner
from vlm_serve.server.response_store import (
    ALL_KEYS,
    RECORD_BYTES,
    ResponseStore,
    Turn,
    memory_of,
    new_response_id,
)

OWNER = Owner(b"key", "salt")


def turn_of(parent: Turn | None, num_bytes: int, name: str = "") -> Turn:
    return Turn(parent, [{"in": name}], {"output": [{"out": name}]}, num_bytes)


def recount(turns: Iterable[Turn | None]) -> int:
    held = {}
    for turn in turns:
        while turn is not None:
            held[id(turn)] = turn.num_bytes
            turn = turn.parent
    return sum(held.values())


def test_a_past_that_turns_share_is_counted_once() -> None:
    async def run() -> None:
        store = ResponseStore(1000, 60)
        first = turn_of(None, 500, "a")
        left, right = turn_of(first, 100, "b"), turn_of(first, 200, "c")
        for name, turn in (("1", first), ("2", left), ("3", right)):
            store.put(OWNER, name, turn)
        assert store.num_bytes(OWNER.key) == 800
        assert store.held_bytes == 800 + len(store._accounts[OWNER.key].responses) * RECORD_BYTES
        assert right.total_bytes == 700
        assert right.past() == [{"in": "a"}, {"out": "a"}, {"in": "c"}]
        assert store.delete(OWNER, "1")
        assert store.num_bytes(OWNER.key) == 800  # later turns continue it
        assert store.delete(OWNER, "2")
        assert store.num_bytes(OWNER.key) == 700
        assert store.delete(OWNER, "3")
        assert store.num_bytes(OWNER.key) == 0

    asyncio.run(run())


def test_the_oldest_make_room_for_the_newest() -> None:
    async def run() -> None:
        store = ResponseStore(1000, 60)
        for number in range(5):
            store.put(OWNER, str(number), turn_of(None, 300))
        assert [store.find(OWNER, str(n)) is not None for n in range(5)] == [False, False] + [
            True
        ] * 3
        store.put(OWNER, "large", turn_of(None, 1001))
        assert store.find(OWNER, "large") is not None, "its client was told that it is stored"
        assert store.num_bytes(OWNER.key) == 1001
        store.put(OWNER, "next", turn_of(None, 10))
        assert store.num_bytes(OWNER.key) == 10

    asyncio.run(run())


def test_nothing_is_dropped_that_frees_nothing() -> None:
    """Of a conversation that fills the store, all turns are there, or those that fit."""

    async def run() -> None:
        store, last = ResponseStore(1000, 60), None
        for number in range(11):
            last = turn_of(last, 95)
            store.put(OWNER, f"a{number}", last)
        there = [store.find(OWNER, f"a{n}") is not None for n in range(11)]
        assert there == [True] * 11 and store.num_bytes(OWNER.key) == 1045
        for number in range(3):
            store.put(OWNER, f"b{number}", turn_of(None, 95))
        assert store.num_bytes(OWNER.key) <= 1000
        there = [store.find(OWNER, f"a{n}") is not None for n in range(11)]
        assert there == [True] * 7 + [False] * 4, "the others hold the memory of these"
        assert all(store.find(OWNER, f"b{number}") for number in range(3))

    asyncio.run(run())


def test_others_have_nothing_of_it() -> None:
    async def run() -> None:
        store = ResponseStore(1000, 60)
        store.put(OWNER, "1", turn_of(None, 900))
        for other in (Owner(b"key", "other"), Owner(b"other", "salt"), Owner(b"key", "")):
            assert store.find(other, "1") is None
            assert not store.delete(other, "1")
        store.put(Owner(b"other", "salt"), "2", turn_of(None, 900))  # has a bound of its own
        assert store.find(OWNER, "1") is not None
        store.put(Owner(b"key", "other"), "3", turn_of(None, 900))  # a salt has none
        assert store.find(OWNER, "1") is None
        store.clear()
        assert store.num_bytes(b"key") == store.num_bytes(b"other") == 0

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_things_keeps_count(seed: int) -> None:
    async def run() -> None:
        dice = random.Random(seed)
        store = ResponseStore(2000, 3600)
        names: list[str] = []
        orphans: list[Turn] = []  # requests that still run while their past is forgotten
        for number in range(400):
            known = [name for name in names if store.find(OWNER, name)]
            action = dice.random()
            if action < 0.2 and known:
                assert store.delete(OWNER, dice.choice(known))
            elif action < 0.25:
                store.clear()
            else:
                pool = [store.find(OWNER, name) for name in known] + orphans
                parent = dice.choice([None, *pool])
                if parent is not None and parent.total_bytes > 2000:
                    continue  # as `new_turn` refuses it
                turn = turn_of(parent, dice.randrange(1, 400))
                orphans = [turn, *orphans[:2]]
                names.append(str(number))
                store.put(OWNER, names[-1], turn)
            held = [store.find(OWNER, name) for name in names]
            assert store.num_bytes(OWNER.key) == recount(held)
            # What the newest one continues is held for it, and dropping it would free nothing.
            newest = store.find(OWNER, names[-1]) if names else None
            line = {id(newest)}
            while newest is not None:
                newest = newest.parent
                line.add(id(newest))
            assert recount(held) <= 2000 or all(id(turn) in line for turn in held if turn)

    asyncio.run(run())


def test_a_response_has_its_time() -> None:
    async def run() -> None:
        store = ResponseStore(1000, 0.01)
        store.put(OWNER, "1", turn_of(None, 10))
        while store.find(OWNER, "1") is not None:
            await asyncio.sleep(0.005)
        assert store.num_bytes(OWNER.key) == 0

    asyncio.run(asyncio.wait_for(run(), 30))


def test_memory_is_what_texts_take() -> None:
    plain = memory_of([{"image_url": ""}])
    assert memory_of([{"image_url": "x" * 100_000}]) == plain + 100_000
    assert memory_of({"x" * 100_000: 1}) > 100_000


def test_ids_are_128_random_bits() -> None:
    ids = {new_response_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(bytes.fromhex(each.removeprefix("resp_"))) == 16 for each in ids)


def test_all_keys_together_have_a_bound() -> None:
    async def run() -> None:
        store = ResponseStore(1000, 60)
        for number in range(ALL_KEYS + 3):
            owner = Owner(b"key %d" % number, "")
            for name in ("1", "2"):
                store.put(owner, name, turn_of(None, 500 - number))
            assert store.find(owner, "2") is not None, "the newest one stays"
        held = [store.num_bytes(b"key %d" % number) for number in range(ALL_KEYS + 3)]
        assert max(held) <= 1000 and 3000 < sum(held) <= ALL_KEYS * 1000

    asyncio.run(run())


def test_a_key_has_a_number_of_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_RESPONSES", 3)

    async def run() -> None:
        store = ResponseStore(1 << 20, 60)
        turn: Turn | None = None
        for number in range(6):
            turn = turn_of(turn, 10) if number < 3 else turn_of(None, 10)
            store.put(OWNER, str(number), turn)
        kept = [number for number in range(6) if store.find(OWNER, str(number))]
        assert len(kept) == 3 and kept[-1] == 5
        assert store.num_bytes(OWNER.key) == recount(
            [store.find(OWNER, str(number)) for number in kept]
        )

    asyncio.run(run())
