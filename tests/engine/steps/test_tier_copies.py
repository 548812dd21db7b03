"""What tiers read and write beside steps, on a device that works behind the host."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fake_device import FakeDevice
from queued_device import COPY_FAULTS, QueuedCopies

from vlm_serve.cache.tiers.entry import Arriving, Content, Entry, EntryId, Kind, here
from vlm_serve.engine.requests.plan import PartialFold, Slice, StepPlan
from vlm_serve.engine.steps.tier_copies import Saving
from vlm_serve.engine.steps.tier_transfer import TensorTransfer
from vlm_serve.models.cache_layout import CacheLayout, Pool
from vlm_serve.models.cache_layout import Content as PoolContent

BLOCK, BLOCKS, ROWS = 4, 6, 6
POOLS = (
    Pool("kv", "kv", "block", (2, -1, 1, 3), None),
    Pool("conv", "inputs", "row", (5, 3), None),
    Pool("recurrent", "state", "row", (1, 6, 4), None),
)
TYPES: dict[PoolContent, torch.dtype] = {
    "kv": torch.bfloat16,
    "inputs": torch.bfloat16,
    "state": torch.float32,
}
Place = tuple[str, int]


def plan(blocks: Sequence[int] = (), row: int = -1) -> StepPlan:
    """A step of a sequence that has these blocks and this row as new."""
    item = Slice(0, "decode", (0,), 0, 1, row, row, 0, tuple(blocks), 0)
    return StepPlan((item,))


class World:
    """Pools on a fake device, steps over them, and what they have to hold.

    Attributes:
        content: a number by block and row; all values of a block or row have it.
    """

    def __init__(self, seed: int = 0) -> None:
        self.device = FakeDevice(seed)
        self.streams = QueuedCopies(self.device), QueuedCopies(self.device)
        self.caches = CacheLayout.of([POOLS] * 2).allocate(BLOCKS, ROWS, BLOCK, TYPES)
        self.transfer = TensorTransfer(self.caches, self.streams)
        places = [*(("block", n) for n in range(BLOCKS)), *(("row", n) for n in range(ROWS))]
        self.content = dict.fromkeys(places, 0)
        self.faults = list[Callable[[], bool]]()

    def waiting(self, number: int) -> int:
        """Work that is queued in the stream of evictions (0) or loads (1)."""
        stream: Any = self.streams[number]._stream
        return len(stream.queued)

    def pools(self, place: Place) -> list[torch.Tensor]:
        unit, number = place
        return [pool[number] for pool in self.caches.of_unit(unit)]  # type: ignore[arg-type]

    def write(self, place: Place, value: int) -> None:
        """Let a step write all of a block or row."""
        self._wait(place)
        self.content[place] = value

        def step() -> None:
            for pool in self.pools(place):
                pool.fill_(value)

        self.device.queue(step)

    def read(self, place: Place) -> None:
        """Let a step read a block or row."""
        self._wait(place)
        expected, found = self.content[place], list[bool]()
        self.device.queue(
            lambda: found.append(all(bool((pool == expected).all()) for pool in self.pools(place)))
        )
        self.faults.append(lambda: found != [True])

    def evict(self, place: Place) -> Content | Arriving:
        unit, number = place
        own = self.transfer.read_kv(number, BLOCK) if unit == "block" else None
        found = own if own is not None else self.transfer.read_state(number)
        expected = self.bytes_of(place)
        self.faults.append(lambda: bytes(here(found)) != expected)
        return found

    def load(self, place: Place, value: int) -> None:
        self.content[place] = value
        kind = Kind.KV if place[0] == "block" else Kind.STATE
        layout, count = self.transfer.layout(kind, BLOCK), BLOCK
        entry = Entry(EntryId(kind, bytes(32)), count, True, layout, self.bytes_of(place))
        staged = self.transfer.stage(entry)
        assert staged is not None
        write = self.transfer.write_kv if kind is Kind.KV else self.transfer.write_state
        write(place[1], staged)

    def bytes_of(self, place: Place) -> bytes:
        parts = [torch.full_like(pool, self.content[place]) for pool in self.pools(place)]
        return b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)

    def wrong(self) -> bool:
        """Run all that is queued. Return True if anything was not as it has to be."""
        self.device.synchronize()
        return any(fault() for fault in self.faults)

    def _wait(self, place: Place) -> None:
        self.transfer.wait_for(plan([place[1]]) if place[0] == "block" else plan(row=place[1]))


def goes_wrong(seed: int, actions: int = 60) -> bool:
    """Steps, evictions and loads in random order; some of it runs meanwhile."""
    world, rng = World(seed), random.Random(seed)
    for value in range(1, actions):
        place, action = rng.choice(list(world.content)), rng.randrange(5)
        if action == 0:
            world.write(place, value)
        elif action == 1:
            world.read(place)
        elif action == 2:
            world.evict(place)
        elif action == 3:
            world.load(place, value)
        else:
            for stream in world.device.streams:
                if stream.queued:
                    stream.run_next()
    return world.wrong()


def test_whatever_is_read_and_written_beside_steps_is_as_in_their_order() -> None:
    assert not any(goes_wrong(seed) for seed in range(12))


@pytest.mark.parametrize("fault", COPY_FAULTS)
def test_faults_are_seen(fault: str) -> None:
    owner, name, instead = COPY_FAULTS[fault]
    with patch.object(owner, name, instead):
        assert any(goes_wrong(seed) for seed in range(12))


def test_no_step_waits_for_an_eviction() -> None:
    world = World()
    world.write(("row", 1), 7)
    saving = world.evict(("row", 1))
    assert isinstance(saving, Saving)
    world.write(("row", 1), 8)
    world.device.current.synchronize()
    assert all((pool == 8).all() for pool in world.pools(("row", 1)))
    assert world.waiting(0), "the copy has not begun"
    assert not world.wrong()


def test_a_step_waits_for_what_it_needs_alone() -> None:
    world = World()
    world.load(("row", 1), 5)
    world.load(("block", 2), 6)
    world.load(("block", 3), 7)
    before = world.waiting(1)
    world.read(("row", 0))
    world.read(("block", 1))
    world.device.current.synchronize()
    assert world.waiting(1) == before, "nothing is loaded yet"
    world.read(("row", 1))
    world.device.current.synchronize()
    assert 0 < world.waiting(1) < before, "the state has come, the blocks have not"
    assert not world.wrong() and world.transfer.arrivals, "nobody needs the blocks"


@pytest.mark.parametrize(
    "moved",
    [
        StepPlan((), row_copies=((1, 2),)),
        StepPlan((), folds=((1, 0, 1),)),
        StepPlan((), partial_folds=(PartialFold(1, 2, 0, 1),)),
    ],
)
def test_what_a_step_copies_and_folds_is_waited_for(moved: StepPlan) -> None:
    world = World()
    world.load(("row", 1), 5)
    world.transfer.wait_for(moved)
    assert not world.transfer.arrivals


def test_more_evictions_than_there_is_memory_for_wait_for_the_oldest() -> None:
    world = World()
    for value in range(9):
        world.write(("row", value % ROWS), value)
        world.evict(("row", value % ROWS))
    ring = world.transfer._ring
    assert ring is not None and len(ring._taken) <= 2
    assert not world.wrong()


def test_a_tail_is_read_and_written_by_its_tokens() -> None:
    world = World()
    world.write(("block", 1), 3)
    found = world.transfer.read_kv(1, 2)
    payload = bytes(here(found))
    assert len(payload) == world.transfer.num_bytes(Kind.KV, 2)
    layout = world.transfer.layout(Kind.KV, 2)
    staged = world.transfer.stage(Entry(EntryId(Kind.KV, bytes(32)), 2, True, layout, payload))
    assert staged is not None
    world.transfer.write_kv(4, staged)
    world.device.synchronize()
    (pool,) = world.pools(("block", 4))
    assert (pool[:, :, :2] == 3).all() and (pool[:, :, 2:] == 0).all()
