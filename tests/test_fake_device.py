"""The fake device keeps a GPU's promises, and no more of them."""

from __future__ import annotations

from functools import partial

import torch
from fake_device import Event, FakeDevice, FakeTorch, Stream
from fake_graphs import Eager, Memory


def test_pinned_memory_is_read_when_the_copy_runs() -> None:
    device, target = FakeDevice(), torch.zeros(2, 4, dtype=torch.int32)
    host = FakeTorch(device).empty(64, dtype=torch.uint8, pin_memory=True)
    table = host[32:].view(torch.int32).view(2, 4)
    table.fill_(1)
    target.copy_(table, non_blocking=True)
    table[1] = torch.tensor([2, 2, 2, 2])
    assert not target.any()
    device.synchronize()
    assert target.tolist() == [[1] * 4, [2] * 4]
    table[0].numpy()[:2] = 7
    target.copy_(table)
    assert target[0].tolist() == [7, 7, 1, 1], "a copy that blocks is made at once"


def test_what_is_no_view_of_pinned_memory_is_not_pinned() -> None:
    device, target = FakeDevice(), torch.zeros(16, dtype=torch.uint8)
    host = device.pinned(16)
    target.copy_(host + 1, non_blocking=True)
    assert set(target.tolist()) == {0x80}
    for part in torch.split(host, [12, 4]):
        target[: len(part)].copy_(part, non_blocking=True)
    assert set(target.tolist()) == {0x80}, "queued"


def test_a_stream_runs_in_its_order_when_somebody_waits() -> None:
    device, seen = FakeDevice(), list[int]()
    for number in range(5):
        device.queue(partial(seen.append, number))
        if number == 2:
            (event := Event(device)).record()
    assert not seen and not event.query()
    event.synchronize()
    assert seen == [0, 1, 2] and event.query()
    assert device.longest == 5
    device.current.synchronize()
    assert seen == [0, 1, 2, 3, 4]


def test_streams_have_no_order_without_events() -> None:
    def order(seed: int, waits: bool) -> str:
        device, seen = FakeDevice(seed), list[str]()
        side = Stream(device)
        device.queue(partial(seen.append, "a"))
        if waits:
            side.wait_stream(device.current)
        with device.using(side):
            device.queue(partial(seen.append, "b"))
        device.synchronize()
        return "".join(seen)

    assert {order(seed, waits=False) for seed in range(20)} == {"ab", "ba"}
    assert {order(seed, waits=True) for seed in range(20)} == {"ab"}


def test_a_stream_waits_for_the_place_that_was_recorded() -> None:
    device, seen = FakeDevice(), list[str]()
    side, event = Stream(device), Event(device)
    device.queue(partial(seen.append, "a"))
    event.record()
    device.queue(partial(seen.append, "c"))
    with device.using(side):
        event.wait()
        device.queue(partial(seen.append, "b"))
    side.synchronize()
    assert seen == ["a", "b"]


def test_nobody_waits_for_an_event_that_was_not_recorded() -> None:
    device, seen = FakeDevice(), list[int]()
    device.queue(partial(seen.append, 1))
    event = Event(device)
    event.synchronize()
    event.wait()
    assert event.query() and not seen


def test_memory_that_is_freed_is_overwritten_and_used_at_once() -> None:
    memory = Memory()
    with Eager(memory):
        assert torch.ones(0, 3)[:, 1].shape == (0,)
        first = torch.ones(5) + 1
        view, address = first[2:], first.data_ptr()
        named = memory.named(view)
        del first
        assert view.tolist() == [2, 2, 2] and (torch.ones(5) + 1).data_ptr() != address
        assert named is not None and named.tolist() == [2, 2, 2]
        del view
        assert named.isnan().all()
        second = torch.ones(5).mul(3)
    assert named.tolist() in ([1, 1, 1], [3, 3, 3]) and second.tolist() == [3] * 5


def test_an_event_waits_for_what_was_queued_before_it_on_its_stream() -> None:
    """And for what that waits for; nothing behind it runs, nor in another stream."""
    device, done = FakeDevice(), list[str]()
    other = Stream(device)

    def queue(name: str) -> None:
        device.queue(lambda: done.append(name))

    with device.using(other):
        queue("other")
        before = Event(device)
        before.record()
        queue("behind the other")
    queue("first")
    before.wait()
    queue("second")
    event = Event(device)
    event.record()
    queue("third")
    assert not event.query()
    event.synchronize()
    assert done == ["first", "other", "second"] and event.query()
    event.synchronize()
    assert len(done) == 3
    device.synchronize()
    assert sorted(done[3:]) == ["behind the other", "third"]
