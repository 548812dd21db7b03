"""How steps are captured and repeated: `CudaGraphs` on fake GPUs, one or two of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fake_device import FakeDevice, FakeTorch, Stream
from queued_device import QueuedDevice

from vlm_serve.engine.steps import step_tables
from vlm_serve.engine.steps.step_tables import CudaGraphs, largest_first
from vlm_serve.kernels.norms import rms_norm
from vlm_serve.kernels.triton_support import interpreted

CARDS = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture
def cards() -> Iterator[tuple[FakeDevice, FakeDevice]]:
    """Two GPUs of one process, the first of which is the current one."""
    both = FakeDevice(), FakeDevice()
    with patch.object(step_tables, "torch", FakeTorch(*both)):
        yield both


def streams_of(graphs: CudaGraphs, device: FakeDevice, count: int = 1) -> set[Stream]:
    """The streams of some warm-ups and captures."""
    seen: set[Stream] = set()
    before = len(device.captures)
    for _ in range(count):
        graphs.warm_up(lambda: seen.add(device.current))
        graphs.capture(lambda: seen.add(device.current))
    return seen | {each.stream for each in device.captures[before:]}


def test_an_engine_captures_on_its_own_gpu(cards: tuple[FakeDevice, FakeDevice]) -> None:
    """Whichever captures first, and although the first GPU is the current one."""
    for place, device in zip(CARDS, cards, strict=True):
        (stream,) = streams_of(CudaGraphs(place), device, 2)
        assert stream.device is device
        assert stream is not device.streams[0], "the default stream cannot be captured"


def test_engines_of_one_gpu_have_a_stream_and_a_pool_each(
    cards: tuple[FakeDevice, FakeDevice],
) -> None:
    engines = [CudaGraphs(CARDS[0]) for _ in range(2)]
    streams = [streams_of(each, cards[0], 2) for each in engines]
    assert [len(each) for each in streams] == [1, 1] and streams[0] != streams[1]
    pools = [each.pool for each in cards[0].captures]
    assert None not in pools and pools[0] is pools[1] and pools[2] is pools[3]
    assert pools[0] is not pools[2]
    # An engine allocates while another one captures.
    assert {each.errors for each in cards[0].captures} == {"thread_local"}


@pytest.mark.parametrize("seed", range(8))
def test_a_warm_up_has_its_place_among_what_is_queued(seed: int) -> None:
    """And a step is warmed up before it is captured: kernels are compiled then."""
    device, seen = FakeDevice(seed), list[str]()
    with patch.object(step_tables, "torch", FakeTorch(device)):
        graphs = CudaGraphs(CARDS[0])
        device.queue(partial(seen.append, "tables"))
        graphs.warm_up(partial(device.queue, partial(seen.append, "warm-up")))
        device.queue(partial(seen.append, "step"))
        device.synchronize()
        assert seen == ["tables", "warm-up", "step"]
        seen.clear()
        graphs.capture(lambda: seen.append("captured" if device.capturing else "warm-up"))
    assert seen == [*["warm-up"] * (len(seen) - 1), "captured"] and len(seen) > 1


def test_without_a_stream_all_engines_share_the_first_ones(
    cards: tuple[FakeDevice, FakeDevice],
) -> None:
    """As torch has it, so that the tests above could fail."""
    fake: Any = vars(step_tables)["torch"]
    for place, device in zip(CARDS, cards, strict=True):
        with fake.cuda.stream(fake.cuda.Stream(place)):
            with fake.cuda.graph(fake.cuda.CUDAGraph()):
                pass
            assert (fake.cuda.capture_stream().device is device) == (place.index == 0)


def test_a_capture_computes_nothing_and_a_replay_what_it_saw() -> None:
    device, x = QueuedDevice(), torch.zeros(3)
    kept = {"out": torch.zeros(3)}
    computed: list[int] = []

    def step() -> None:
        computed.append(1)
        y = torch.nn.functional.dropout(x + 1, training=False).float().reshape(3, 1)
        kept["out"].copy_(y.t().contiguous().double().float().sum(0) * 2)

    replay = device.capture(step)
    out, calls = kept["out"], len(computed)
    assert out.tolist() == [2, 2, 2], "of the warm-up"
    x.fill_(4)
    kept["out"] = torch.zeros(3)
    replay()
    assert out.tolist() == [2, 2, 2] and device.calls == 0
    device.synchronize()
    assert out.tolist() == [10, 10, 10] and kept["out"].tolist() == [0, 0, 0]
    assert device.calls == 1 and len(computed) == calls


@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
def test_a_replay_launches_kernels_on_the_tensors_that_they_saw() -> None:
    device, x, out = QueuedDevice(), torch.ones(2, 16), torch.zeros(2, 16)
    weight = torch.zeros(16)

    def step() -> None:
        out.copy_(rms_norm(x, weight, 1e-6))

    replay = device.capture(step)
    weight.fill_(2)
    replay()
    device.synchronize()
    torch.testing.assert_close(out, torch.full((2, 16), 3.0))


@pytest.mark.parametrize("read", ["tolist", "item", "cpu", "mask", "new"])
def test_a_capture_waits_for_no_value(read: str) -> None:
    x = torch.ones(1)
    reads: dict[str, Any] = {
        "tolist": x.tolist,
        "item": x.item,
        "cpu": x.cpu,
        "mask": lambda: x[x > 0],
        "new": lambda: torch.tensor([1.0]),
    }

    class Quiet(QueuedDevice):
        def warm_up(self, step: Any) -> None:
            pass

    with pytest.raises(AssertionError, match="under capture"):
        Quiet().capture(reads[read])


def test_a_replay_finds_nothing_of_the_one_before() -> None:
    """In memory that a step allocates and does not write."""
    device, x, out = QueuedDevice(), torch.zeros(4), torch.zeros(4)

    def step() -> None:
        rows = torch.empty(4)
        rows[:2] = x[:2]
        out.copy_(rows)
        rows[2:].fill_(5)

    replay = device.capture(step)
    for _ in range(2):
        replay()
        device.synchronize()
        assert out.isnan().tolist() == [False, False, True, True]


def test_results_of_a_capture_are_overwritten_by_the_next_one() -> None:
    """Graphs share their memory: what is freed in one is used by the next, and what is kept of it
    without a copy is another step's."""
    device, x = QueuedDevice(), torch.zeros(4)
    kept: dict[int, torch.Tensor] = {}

    def captured(size: int) -> Any:
        def step() -> None:
            kept[0] = x[:size] + size

        return device.capture(step)

    small, large = largest_first((2, 4), captured)
    of_small = kept.pop(0)
    small()
    device.synchronize()
    assert of_small.tolist() == [2, 2]
    large()
    device.synchronize()
    assert of_small.tolist() == [4, 4]
    # What is kept to the end is nobody else's.
    device.capture(lambda: kept.update({1: x + 7}))
    assert kept[1].untyped_storage().data_ptr() != of_small.untyped_storage().data_ptr()
