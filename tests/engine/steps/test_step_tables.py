"""Tables that captured steps read: where they lie, and that none is filled while it is read."""

from __future__ import annotations

import pytest
import torch
from make_checkpoint import make_checkpoint
from queued_device import FAULTS, QueuedDevice, broken, with_queue
from step_graphs import SPECS

from vlm_serve.engine.steps.step_tables import HostRing, Parts, StepTables, Table, Tables
from vlm_serve.kernels.triton_support import interpreted
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

PARTS: dict[str, Tables] = {
    "small": {"a": Table(torch.int32, (3,)), "b": Table(torch.int64, (2, 5), -1)},
    "other": {"a": Table(torch.int32, (1,))},
}


def filled(tables: StepTables, first: int) -> Parts:
    """Sends consecutive numbers, one for each table."""
    staged = tables.stage()
    for number, table in enumerate(each for part in staged.values() for each in part.values()):
        table.fill_(first + number)
    tables.send()
    return staged


def numbers(tables: StepTables) -> list[set[int]]:
    return [
        set(each.flatten().tolist()) for part in tables.fixed.values() for each in part.values()
    ]


def test_tables_arrive_and_start_at_16_bytes() -> None:
    device = QueuedDevice()
    tables = StepTables(PARTS, HostRing(device), torch.device("cpu"))
    assert numbers(tables) == [{0}, {0}, {0}]
    begin = tables.fixed["small"]["a"].data_ptr()
    for part, own in PARTS.items():
        for name, (dtype, shape, *_) in own.items():
            table = tables.fixed[part][name]
            assert (table.dtype, tuple(table.shape)) == (dtype, shape)
            assert (table.data_ptr() - begin) % 16 == 0
    filled(tables, 1)
    device.synchronize()
    assert numbers(tables) == [{1}, {2}, {3}]


def test_what_a_step_does_not_write_is_padding() -> None:
    device = QueuedDevice()
    tables = StepTables(PARTS, HostRing(device), torch.device("cpu"))
    for first in (1, 5, 9):
        filled(tables, first)
    tables.stage()["small"]["a"][0] = 7
    tables.send()
    device.synchronize()
    assert numbers(tables) == [{7, 0}, {-1}, {0}]


def test_a_ring_serves_tables_of_several_sizes() -> None:
    device = QueuedDevice()
    ring = HostRing(device)
    small = StepTables({"one": {"a": Table(torch.int32, (2,))}}, ring, torch.device("cpu"))
    filled(small, 8)
    large = StepTables(PARTS, ring, torch.device("cpu"))
    filled(large, 1)
    filled(small, 5)
    filled(large, 11)
    device.synchronize()
    assert numbers(small) == [{5}]
    assert numbers(large) == [{11}, {12}, {13}]


def replayed(device: QueuedDevice) -> list[list[set[int]]]:
    """What a captured step reads in each of five steps, of which the host waits for none."""
    tables = StepTables(PARTS, HostRing(device), torch.device("cpu"))
    parts = [each for part in tables.fixed.values() for each in part.values()]
    seen = [torch.zeros(len(FIRSTS), each.numel(), dtype=torch.int64) for each in parts]
    turn = torch.zeros(1, dtype=torch.int64)

    def step() -> None:
        for record, table in zip(seen, parts, strict=True):
            record[turn] = table.flatten().to(torch.int64)
        turn.add_(1)

    replay = device.capture(step)
    turn.zero_()
    for first in FIRSTS:
        filled(tables, first)
        replay()
    # Copy and replay of two steps, and the replay of the one before, whose copy was waited for.
    assert device.device.longest >= 5, "the host was never two steps ahead"
    device.synchronize()
    return [[set(record[place].tolist()) for record in seen] for place in range(len(FIRSTS))]


FIRSTS = 10, 20, 30, 40, 50
EXPECTED = [[{first}, {first + 1}, {first + 2}] for first in FIRSTS]


def test_a_buffer_is_filled_again_only_when_its_copy_was_made() -> None:
    assert replayed(QueuedDevice()) == EXPECTED


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    with broken(fault):
        assert replayed(QueuedDevice()) != EXPECTED


@pytest.mark.interpreter
@pytest.mark.parametrize("spec", ["dense", "attention alone"])
@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
def test_a_prompt_in_steps_that_read_nothing_back(
    spec: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt's first steps give no token, so that the host is steps ahead of the device."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("queue"), SPECS[spec])
    config = EngineConfig(
        dtype="float32",
        block_size=16,
        cache_memory="16MiB",
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=256,
        compiled_kernels=False,
    )

    def answer() -> list[dict[int, float]]:
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=1)
        with Pipeline(checkpoint, config) as pipe:
            output = pipe.generate([7 * place % 401 for place in range(200)], params)
            pipe.engine.check()
        assert output.logprobs is not None
        return output.logprobs

    def largest_difference(mine: list[dict[int, float]]) -> float:
        return max(
            abs(next(iter(got.values())) - next(iter(want.values())))
            for got, want in zip(mine, expected, strict=True)
        )

    expected = answer()
    device = QueuedDevice()
    with_queue(monkeypatch, device)
    assert largest_difference(answer()) < 1e-4
    assert device.calls > 6 and device.device.longest > 2, "the host never ran ahead"
    # The device shows the fault that it is for, be it as a NaN.
    with_queue(monkeypatch, QueuedDevice())
    with broken("filled too early"):
        assert not largest_difference(answer()) < 1e-3
