"""Which embeddings are asked for, and what becomes of those that come up."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from functools import partial

import pytest
import torch
from tier_entries import StackInCaller

from vlm_serve.cache.tiers.entry import Entry, EntryId, Kind, Origin
from vlm_serve.cache.tiers.host import HostStore
from vlm_serve.cache.tiers.stack import TierStack
from vlm_serve.cache.tiers.store_calls import WaitBudget
from vlm_serve.engine.core import media_tiers
from vlm_serve.engine.core.media_tiers import EmbeddingForm, EmbeddingTiers

FORM = EmbeddingForm(8, torch.bfloat16)
TOKENS = 4


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def rows(number: int) -> torch.Tensor:
    return torch.full((TOKENS, FORM.width), float(number), dtype=FORM.dtype)


def following(*numbers: int) -> list[tuple[bytes, int]]:
    return [(key(number), TOKENS) for number in numbers]


@pytest.fixture
def stack() -> Iterator[TierStack]:
    made = StackInCaller(Origin(bytes(32)), [HostStore(1 << 20)])
    yield made
    made.close()


@pytest.fixture
def tiers(stack: TierStack) -> EmbeddingTiers:
    """Those numbered 1 to 4 are below."""
    made = EmbeddingTiers(stack, FORM, rows)
    for number in range(1, 5):
        made.save(key(number), number)
    return made


def arrive(tiers: EmbeddingTiers, stack: TierStack) -> list[list[int]]:
    """Reads what has been asked for; which ones that was."""
    starting, tiers.starting = tiers.starting, []
    for fetch in starting:
        tiers.finish(fetch, stack.submit(tiers.read(fetch)).result())
    return [[int.from_bytes(each, "little") for each, _ in fetch.wanted] for fetch in starting]


def test_what_is_saved_comes_up_with_all_that_follows(
    tiers: EmbeddingTiers, stack: TierStack
) -> None:
    assert tiers.poll(0, key(1), lambda: following(1, 2, 9)) is None and tiers.busy
    assert tiers.poll(0, key(2), list) is None, "it is on its way already"
    assert tiers.poll(0, key(9), list) is False, "nobody has it"
    assert arrive(tiers, stack) == [[1, 2]] and not tiers.busy
    assert tiers.num_bytes == 2 * TOKENS * FORM.token_bytes
    for number in (1, 2):
        assert tiers.poll(0, key(number), list) is True
        found = tiers.take(key(number))
        assert found is not None and found.tier == "host"
        assert torch.equal(found.rows, rows(number))
    assert tiers.num_bytes == 0 and tiers.take(key(1)) is None
    assert tiers.poll(0, key(1), list) is False, "a sequence asks once"


def test_sequences_share_what_comes_up(tiers: EmbeddingTiers, stack: TierStack) -> None:
    for sequence in (0, 1):
        assert tiers.poll(sequence, key(3), lambda: following(3)) is None
    assert arrive(tiers, stack) == [[3]]
    tiers.release(0)
    assert tiers.poll(1, key(3), list) is True
    tiers.release(1)
    assert tiers.num_bytes == 0 and tiers.take(key(3)) is None


def test_what_nobody_waits_for_any_more_is_not_kept(
    tiers: EmbeddingTiers, stack: TierStack
) -> None:
    assert tiers.poll(0, key(1), lambda: following(1)) is None
    tiers.release(0)
    arrive(tiers, stack)
    assert tiers.num_bytes == 0


def test_one_request_brings_up_so_much_at_a_time(
    tiers: EmbeddingTiers, stack: TierStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_tiers, "AHEAD_BYTES", 2 * TOKENS * FORM.token_bytes)
    assert tiers.poll(0, key(1), lambda: following(1, 2, 3, 4)) is None
    assert arrive(tiers, stack) == [[1, 2]]
    assert tiers.poll(0, key(3), lambda: following(3, 4)) is None
    assert arrive(tiers, stack) == [[3, 4]]


def test_what_is_on_its_way_during_a_flush_is_not_taken_in(
    tiers: EmbeddingTiers, stack: TierStack
) -> None:
    assert tiers.poll(0, key(1), lambda: following(1)) is None
    arrive(tiers, stack)
    assert tiers.poll(1, key(2), lambda: following(2)) is None
    tiers.forget()
    arrive(tiers, stack)
    assert tiers.num_bytes == 0
    assert tiers.poll(0, key(1), list) is False and tiers.poll(1, key(2), list) is False


def test_a_store_s_time_limit_is_for_all_that_a_request_waits(
    tiers: EmbeddingTiers, stack: TierStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[float]()
    locate = stack.locate

    async def slow(ids: Collection[EntryId], since: float | None = None) -> dict[EntryId, str]:
        assert since is not None
        told.append(asyncio.get_running_loop().time() - since)
        await asyncio.sleep(0.02)
        return await locate(ids, since)

    monkeypatch.setattr(stack, "locate", slow)
    patience = WaitBudget(0.5)
    for number in (1, 2):
        tiers.poll(0, key(number), partial(following, number), patience)
        arrive(tiers, stack)
    assert told[0] >= 0.5 and told[0] + 0.02 <= told[1]
    assert told[1] + 0.02 <= patience.spent < 60


def test_a_read_that_raises_is_a_counted_miss(tiers: EmbeddingTiers, stack: TierStack) -> None:
    assert tiers.poll(0, key(1), lambda: following(1)) is None
    tiers.finish(tiers.starting.pop(), None)
    assert tiers.poll(0, key(1), list) is False and stack.counts["failed"] == 1


def test_what_cannot_be_read_is_not_saved(stack: TierStack) -> None:
    def gone(slot: int) -> torch.Tensor | None:
        if slot:
            raise RuntimeError("the device is lost")
        return None

    made = EmbeddingTiers(stack, FORM, gone)
    made.save(key(1), 0)
    made.save(key(2), 1)
    assert stack.counts == {"failed": 1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"layout": "float16[4, 8]"},
        {"layout": "bfloat16[4, 16]"},
        {"num_tokens": 5},
        {"source": bytes(63)},
        {"source": bytes(65)},
    ],
)
def test_only_the_own_form_is_taken(stack: TierStack, wrong: dict[str, object]) -> None:
    fields: dict[str, object] = {
        "id": stack.origin.id(Kind.EMBEDDINGS, key(1)),
        "num_tokens": TOKENS,
        "exact": True,
        "layout": FORM.layout(TOKENS),
        "source": bytes(64),
    }
    right, other = Entry(**fields), Entry(**(fields | wrong))  # type: ignore[arg-type]
    assert FORM.rows(right, TOKENS) is not None
    stack.put(other)
    tiers = EmbeddingTiers(stack, FORM, rows)
    assert tiers.poll(0, key(1), lambda: following(1)) is None
    arrive(tiers, stack)
    assert tiers.poll(0, key(1), list) is False
    assert stack.counts["bad"] == 1 and not stack.holds(right.id)
