"""Ranks that meet in shared memory: what they tell each other, and what happens when one fails."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from rank_threads import on_ranks

from vlm_serve.kernels.native_library import RanksApartError
from vlm_serve.kernels.ranks import ALONE, Ranks, SharedRanks
from vlm_serve.kernels.ranks.base import in_order

pytestmark = pytest.mark.usefixtures("compiler")


def _part(rank: int, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(rows, columns, generator=generator) * 10.0 ** (3 * rank)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 5, 700])
def test_sums_are_taken_in_the_order_of_the_ranks_whatever_the_size(size: int, rows: int) -> None:
    parts = [_part(rank, rows, 24) for rank in range(size)]
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part

    def work(ranks: SharedRanks) -> torch.Tensor:
        ranks.begin(1)
        return ranks.sum(parts[ranks.rank])

    for total in on_ranks(size, work, slot_bytes=4096):
        assert isinstance(total, torch.Tensor)
        assert torch.equal(total, expected)


def test_columns_come_together_on_the_first_rank() -> None:
    whole = torch.randn(50, 130)

    def work(ranks: SharedRanks) -> torch.Tensor:
        ranks.begin(1)
        own = ranks.share(130)
        return ranks.columns(whole[:, own.start : own.stop], 130)

    first, *others = on_ranks(4, work, slot_bytes=4096)
    assert isinstance(first, torch.Tensor)
    assert torch.equal(first, whole)
    assert [part.shape[1] for part in others if isinstance(part, torch.Tensor)] == [33, 32, 33]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_of_one_rank_is_told_to_all(dtype: torch.dtype) -> None:
    told = torch.randn(31, 77).to(dtype)

    def work(ranks: SharedRanks) -> torch.Tensor:
        ranks.begin(1)
        like = torch.empty(told.shape, dtype=dtype, device="meta")
        return ranks.broadcast(told if ranks.rank == 2 else None, 2, like)

    for heard in on_ranks(3, work, slot_bytes=4096):
        assert isinstance(heard, torch.Tensor)
        assert torch.equal(heard, told)


def test_many_exchanges_with_ranks_that_dawdle() -> None:
    """A rank that is fast must not write over what a slow one has yet to read."""
    between_steps = threading.Barrier(3)

    def work(ranks: SharedRanks) -> int:
        rng, wrong = random.Random(ranks.rank), 0
        for step in range(1, 21):
            ranks.begin(step)
            for turn in range(20):
                seed, rows = 100 * step + turn, 1 + (turn * step) % 9
                total = ranks.sum(_part(ranks.rank, rows, 16, seed))
                parts = [_part(rank, rows, 16, seed) for rank in range(ranks.size)]
                wrong += not torch.equal(total, in_order(parts))
                if rng.random() < 0.1:
                    torch.randn(200, 200) @ torch.randn(200, 200)
            between_steps.wait()
        return wrong

    assert on_ranks(3, work) == [0, 0, 0]


def test_who_gives_up_keeps_nobody_waiting_and_the_next_step_works() -> None:
    all_done = threading.Barrier(3)

    def work(ranks: SharedRanks) -> str:
        ranks.begin(1)
        try:
            ranks.sum(torch.ones(1, 4))
            if ranks.rank == 1:
                raise MemoryError
            ranks.sum(torch.ones(1, 4))
        except MemoryError:
            ranks.abort()
        except RanksApartError:
            pass
        else:
            return "nobody noticed"
        all_done.wait()
        ranks.begin(2)
        return str(ranks.sum(torch.ones(1, 4)).tolist())

    assert on_ranks(3, work) == ["[[3.0, 3.0, 3.0, 3.0]]"] * 3


def test_who_does_not_come_in_time_is_not_waited_for() -> None:
    def work(ranks: SharedRanks) -> None:
        ranks.begin(1)
        if ranks.rank == 0:
            ranks.sum(torch.ones(1, 4))

    first, second = on_ranks(2, work, limit=0.2)
    assert isinstance(first, RanksApartError)
    assert second is None


def test_the_end_comes_after_every_step() -> None:
    def work(ranks: SharedRanks) -> None:
        ranks.begin(1 << 40)
        if ranks.rank == 1:
            ranks.end()
        else:
            ranks.sum(torch.ones(1, 4))

    first, _ = on_ranks(2, work)
    assert isinstance(first, RanksApartError)


def test_shares_cover_everything_once() -> None:
    for size in (1, 2, 3, 5, 8):
        parts = [Ranks(rank, size).share(756) for rank in range(size)]
        assert [each for part in parts for each in part] == list(range(756))
    assert [list(Ranks(rank, 4).share_or_copy(2)) for rank in range(4)] == [[0], [0], [1], [1]]
    assert list(Ranks(1, 2).share_or_copy(4)) == [2, 3]


def test_who_is_alone_hears_itself() -> None:
    part = torch.randn(2, 3)
    assert not ALONE.shared
    assert ALONE.sum(part) is ALONE.columns(part, 3) is ALONE.broadcast(part, 0, part) is part
    assert ALONE.record() is None
