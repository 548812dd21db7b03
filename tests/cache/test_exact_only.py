"""With `exact_only`, computations of decoding are shared with nobody, in neither direction."""

from __future__ import annotations

import pytest
from cache_texts import Text

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.prefix_cache import LeftState, PrefixCache
from vlm_serve.cache.records import Lease

SIZE = 4
PROMPT = list(range(5, 15))
ANSWER = list(range(20, 32))


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(
        CacheConfig(
            num_blocks=20,
            block_size=SIZE,
            num_live_rows=3,
            num_snapshot_rows=9,
            min_snapshot_gain=1,
            exact_only=True,
        )
    )


def started(cache: PrefixCache, text: Text, length: int) -> Lease:
    """A request with `length` tokens from prefill, and all its snapshots."""
    match = cache.match(text.keys, limit=length - 1, length=length)
    lease = cache.open(match)
    assert cache.take_row(lease) and cache.grow(lease, length)
    for cut in text.cuts(lease.length, length):
        cache.reserve_snapshot(lease, cut, "test")
    cache.commit(lease, text.keys, length, exact_until=length)
    return lease


def test_a_decode_step_publishes_nothing(cache: PrefixCache) -> None:
    text = Text([*PROMPT, *ANSWER])
    lease = started(cache, text, len(PROMPT))
    before = len(list(cache.nodes()))
    for end in range(len(PROMPT) + 1, len(text) + 1):
        assert cache.grow(lease, end)
        cache.commit(lease, text.keys, end, exact_until=len(PROMPT))
        cache.check()
    assert len(list(cache.nodes())) == before == len(PROMPT) // SIZE
    assert lease.length == len(text) and lease.prefilled == len(PROMPT)
    assert not cache.ledger.pending, "nobody waits for what does not come"
    # It ends at a cut point, but decoding made its state.
    text = Text([*PROMPT, *ANSWER[:2]])
    assert len(text) % SIZE == 0
    other = started(cache, text, len(PROMPT))
    assert cache.grow(other, len(text))
    cache.commit(other, text.keys, len(text), exact_until=len(PROMPT))
    cache.close(other, LeftState(text.keys, len(PROMPT)))
    cache.close(lease)
    assert len(list(cache.nodes())) == before and cache.stats.saves["left"] == 0
    cache.check()


def test_an_answer_is_not_taken_from_a_longer_prompt(cache: PrefixCache) -> None:
    """Prefill has computed these tokens for somebody; decoding has to compute them again."""
    text = Text([*PROMPT, *ANSWER])
    cache.close(started(cache, text, len(text)))
    whole = cache.match(text.keys, limit=len(text) - 1)
    assert whole.boundary > len(PROMPT)
    match = cache.match(text.keys, limit=len(PROMPT) - 1, length=len(PROMPT))
    assert match.boundary == match.kv_tokens == len(match.nodes) * SIZE == 8
    assert match.pending_key is None
    lease = started(cache, text, len(PROMPT))
    own = set(lease.own_blocks)
    for end in range(len(PROMPT) + 1, len(text) + 1):
        assert cache.grow(lease, end)
        cache.commit(lease, text.keys, end, exact_until=len(PROMPT))
    assert own <= set(lease.own_blocks) and lease.num_shared == 2
    cache.close(lease)
    cache.check()


def test_a_commit_of_both_is_a_mistake(cache: PrefixCache) -> None:
    text = Text([*PROMPT, *ANSWER])
    lease = cache.open(None)
    assert cache.take_row(lease) and cache.grow(lease, len(text))
    with pytest.raises(AssertionError, match="prefill and decode in one commit"):
        cache.commit(lease, text.keys, len(text), exact_until=len(PROMPT))
