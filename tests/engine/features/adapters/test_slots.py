"""Slots of adapters: who waits for one, who gets it, and what a failed layout does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from vlm_serve.engine.features.adapters.slots import NO_SLOT, AdapterSlots
from vlm_serve.engine.requests.sequence import Sequence
from vlm_serve.errors import OverloadedError
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.kernels.linear.low_rank_factors import LowRankChange, Up
from vlm_serve.models.adapters import Adapter, LowRank

NUMBERS = count()


class Later(Executor):
    """Runs jobs when it is told to."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], None]] = []

    def submit(self, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(job(*args, **kwargs))
            except (MemoryError, torch.OutOfMemoryError) as error:
                future.set_exception(error)

        self._jobs.append(run)
        return future

    def run(self) -> None:
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job()


def sequence(number: int, rank: int = 1) -> Sequence:
    """Make a sequence with an adapter of its own, of 8 bytes a rank."""
    factor = torch.full((rank, 1), float(number))
    change = LowRankChange(factor, torch.ones(rank), (Up(0, 0, factor.T),))
    module = LowRank(factor, factor.T, 1.0)
    adapter = Adapter({"layers.0.mlp.up_proj": module}, AdapterChanges({1: change}, 1))
    request = SimpleNamespace(adapter=adapter)
    own = SimpleNamespace(request=request, adapter_slot=NO_SLOT, number=next(NUMBERS))
    return cast(Sequence, own)


class World:
    def __init__(
        self, count: int, lay_out: Callable[[AdapterChanges], None], room: int | None = None
    ) -> None:
        self.held: dict[int, Adapter | None] = {}
        self.pool = Later()
        self.slots = AdapterSlots(count, self.held.__setitem__, lay_out, self.pool, room)

    def pass_over(self, waiting: list[Sequence], users: list[Sequence]) -> list[bool]:
        """Who of these may start, beside users of slots: those who have started join them."""
        self.slots.begin_pass()
        running, found = [*users], []
        for each in waiting:
            found.append(self.slots.may_start(each, running))
            running += [each] * found[-1]
        return found


def test_an_adapter_that_has_come_gives_way_to_one_that_is_wanted_first() -> None:
    """The only slot is prepared for a sequence, when another one comes to stand before it."""
    world, first, late = World(1, lambda _: None), sequence(1), sequence(2)
    assert world.pass_over([late], []) == [False]
    world.pool.run()
    assert world.pass_over([first, late], []) == [False, False]
    world.pool.run()
    assert world.pass_over([first, late], []) == [True, False]
    assert world.held[0] is first.request.adapter
    assert world.pass_over([late], [first]) == [False], "the slot is in use"
    assert world.slots.missed
    assert world.pass_over([late], []) == [False]
    world.pool.run()
    assert world.pass_over([late], []) == [True]


def test_a_failed_layout_is_told_to_whom_it_was_for() -> None:
    broken = sequence(1)

    def lay_out(changes: AdapterChanges) -> None:
        adapter = broken.request.adapter
        if adapter is not None and changes is adapter.changes:
            raise MemoryError

    world, other = World(1, lay_out), sequence(2)
    assert world.pass_over([broken], []) == [False]
    world.pool.run()
    assert world.pass_over([other], []) == [False]
    world.pool.run()
    world.slots.begin_pass()
    assert world.slots.may_start(other, [])
    with pytest.raises(OverloadedError, match="no memory for the request's adapter"):
        world.slots.may_start(broken, [other])
    assert not world.slots.may_start(broken, [other]), "it is tried again, once there is a slot"


def test_a_failed_layout_leaves_nothing_and_is_not_told_to_later_requests() -> None:
    """Whoever asked for it has gone meanwhile."""
    gone, parts = sequence(1), list[weakref.ref[torch.Tensor]]()

    def lay_out(changes: AdapterChanges) -> None:
        part = torch.ones(3)
        parts.append(weakref.ref(part))
        if len(parts) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    world, later = World(1, lay_out), sequence(1)
    assert world.pass_over([gone], []) == [False]
    world.pool.run()
    world.slots.begin_pass()
    assert parts[0]() is None
    assert world.pass_over([later], []) == [False]
    world.pool.run()
    assert world.pass_over([later], []) == [True]


def test_larger_adapters_take_the_room_of_several() -> None:
    """Four slots have room for four adapters of rank 4, so for two of rank 8."""
    world = World(4, lambda _: None, room=4 * 4 * 8)
    small, large, other, last = sequence(1, 4), sequence(2, 8), sequence(3, 8), sequence(4, 4)

    def start(one: Sequence, users: list[Sequence]) -> bool:
        world.pass_over([one], users)
        world.pool.run()
        return world.pass_over([one], users)[0]

    def resident() -> list[Sequence]:
        held = world.slots.resident
        every = small, large, other, last
        return [one for one in every if cast(Adapter, one.request.adapter).digest in held]

    assert start(small, []) and start(large, [small])
    assert not start(other, [small, large]), "there are slots, and no room"
    assert world.slots.missed and resident() == [small, large]
    assert start(last, [large]), "the rest is as large as this one"
    assert resident() == [small, large, last]
    assert start(other, [last]), "two that nobody uses make room"
    assert resident() == [other, last]
    huge = sequence(5, 100)
    assert not start(huge, [last])
    assert start(huge, []) and not resident(), "it is alone"
    assert sorted(world.held) == [0, 1, 2, 3][: len(world.held)]
    assert [each for each in world.held.values() if each is not None] == [huge.request.adapter]
