"""Bookkeeping of vision embeddings."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from vlm_serve.cache.embeddings import EmbeddingCache


def test_one_medium_is_encoded_once_whoever_asks() -> None:
    cache = EmbeddingCache(100)
    slot, hit = cache.acquire(b"cat", 40)
    assert not hit and b"cat" in cache
    assert cache.acquire(b"cat", 40) == (slot, True)
    cache.release(b"cat")
    cache.release(b"cat")
    assert cache.acquire(b"cat", 40) == (slot, True)
    assert (cache.hits, cache.misses, cache.used) == (2, 1, 40)
    cache.check()


def test_the_least_recently_used_goes_first_and_pinned_ones_stay() -> None:
    cache = EmbeddingCache(100)
    slots = {key: cache.acquire(key, 40)[0] for key in (b"a", b"b")}
    cache.release(b"a")
    cache.release(b"b")
    cache.acquire(b"a", 40)
    cache.acquire(b"c", 40)
    assert cache.take_evicted() == (slots[b"b"],)
    assert cache.take_evicted() == ()
    assert b"a" in cache and b"b" not in cache
    cache.acquire(b"d", 40)
    assert cache.used == 120 and cache.take_evicted() == ()
    cache.release(b"a")
    assert cache.take_evicted() == (slots[b"a"],)
    cache.check()


def test_without_a_budget_embeddings_live_as_long_as_they_are_pinned() -> None:
    cache = EmbeddingCache(0)
    slot, _ = cache.acquire(b"a", 10)
    assert b"a" in cache
    cache.release(b"a")
    assert b"a" not in cache and cache.take_evicted() == (slot,)
    again, hit = cache.acquire(b"a", 10)
    assert not hit and again != slot


def test_a_failed_step_leaves_nothing_to_rely_on() -> None:
    cache = EmbeddingCache(100)
    slot, _ = cache.acquire(b"a", 10)
    cache.acquire(b"a", 10)
    cache.invalidate(b"a")
    assert b"a" not in cache
    cache.release(b"a")
    # Whoever comes now makes it anew, in the same slot while it is pinned.
    assert cache.acquire(b"a", 10) == (slot, False)
    cache.release(b"a")
    cache.release(b"a")
    assert b"a" in cache
    cache.invalidate(b"a")
    assert cache.take_evicted() == (slot,)
    cache.invalidate(b"a")
    cache.check()


def test_releasing_twice_and_changing_size_are_errors() -> None:
    cache = EmbeddingCache(100)
    cache.acquire(b"a", 10)
    with pytest.raises(AssertionError, match="two sizes"):
        cache.acquire(b"a", 11)
    cache.release(b"a")
    with pytest.raises(AssertionError, match="released twice"):
        cache.release(b"a")
    with pytest.raises(AssertionError, match="released twice"):
        cache.release(b"never")


def test_flushing_spares_what_is_pinned() -> None:
    cache = EmbeddingCache(100)
    cache.acquire(b"a", 10)
    cache.acquire(b"b", 10)
    cache.release(b"b")
    cache.flush()
    assert b"a" in cache and b"b" not in cache and len(cache) == 1
    cache.check()


@pytest.mark.parametrize("seed", range(5))
def test_random_use_never_loses_a_pin_or_a_slot(seed: int) -> None:
    rng = random.Random(seed)
    cache = EmbeddingCache(rng.choice([0, 50, 200]))
    sizes = {bytes([index]): rng.randint(1, 40) for index in range(12)}
    pins: Counter[bytes] = Counter()
    alive: dict[int, bytes] = {}
    for _ in range(500):
        key = rng.choice(list(sizes))
        action = rng.random()
        if action < 0.5:
            known = key in cache
            slot, hit = cache.acquire(key, sizes[key])
            assert hit == known
            assert alive.setdefault(slot, key) == key
            pins[key] += 1
        elif action < 0.95 and pins[key]:
            cache.release(key)
            pins[key] -= 1
        elif action < 0.97:
            cache.invalidate(key)
        for slot in cache.take_evicted():
            assert not pins[alive.pop(slot)], "a pinned embedding was evicted"
        cache.check()
    assert len(cache) == len(alive)


def test_the_check_notices_wrong_books() -> None:
    cache = EmbeddingCache(100)
    cache.acquire(b"a", 10)
    cache.used = 9
    with pytest.raises(AssertionError, match="bytes are wrong"):
        cache.check()


def test_whoever_listens_is_told_before_an_embedding_goes_for_want_of_room() -> None:
    cache = EmbeddingCache(100)
    told: list[tuple[bytes, int, bool]] = []
    cache.on_eviction = lambda key, slot: told.append((key, slot, key in cache))
    slots = {key: cache.acquire(key, 60)[0] for key in (b"a", b"b")}
    cache.release(b"a")
    assert told == [(b"a", slots[b"a"], True)]
    cache.release(b"b")
    cache.flush()
    cache.acquire(b"c", 10)
    cache.invalidate(b"c")
    cache.release(b"c")
    assert len(told) == 1, "what is flushed or was never made is nobody's"
