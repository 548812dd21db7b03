"""Ranks whose exchanges are queued on a device, as NCCL's are: the host is told nothing of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice

from vlm_serve.kernels.ranks import group
from vlm_serve.kernels.ranks.base import in_order
from vlm_serve.kernels.ranks.group import GroupRanks


class Wire:
    """Two ranks' exchanges: the first of one meets the first of the other, and so on."""

    def __init__(self) -> None:
        self.devices = [FakeDevice(), FakeDevice()]
        self.sent: list[list[torch.Tensor]] = [[], []]

    def gather(self, rank: int, number: int, parts: list[torch.Tensor], own: torch.Tensor) -> None:
        """Send a part; wait for the other rank's device to come to its part."""
        self.sent[rank].append(own.clone())
        other = 1 - rank
        while len(self.sent[other]) <= number:
            self.devices[other].current.run_next()
        for part, rows in zip(parts, (each[number] for each in self.sent), strict=True):
            part.copy_(rows)


class QueuedDist:
    """`torch.distributed` of one rank over a wire: an exchange returns when it is queued."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self._rank, self._numbers = wire, rank, 0

    def init_process_group(self, *arguments: Any, **options: Any) -> None: ...

    def all_gather(self, parts: list[torch.Tensor], part: torch.Tensor) -> None:
        work = partial(self._wire.gather, self._rank, self._numbers, parts, part)
        self._wire.devices[self._rank].queue(work)
        self._numbers += 1


class Rank:
    """One rank of a process group over a wire."""

    def __init__(self, wire: Wire, rank: int, store: Path, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._dist = patch, QueuedDist(wire, rank)
        self._device = wire.devices[rank]
        patch.setattr(group, "dist", self._dist)
        self.ranks = GroupRanks(rank, 2, store, torch.device("cpu"), limit=1.0)
        self._gathered: list[list[torch.Tensor]] = []

    def queue(self, *values: float) -> None:
        """Queue the exchanges of a step's layers, each of one number."""
        self._patch.setattr(group, "dist", self._dist)
        for each in values:
            self._gathered.append(self.ranks._gather(torch.full((1, 1), each), [1, 1]))

    def sums(self) -> list[float]:
        """Wait for the device and read what was summed."""
        self._device.synchronize()
        return [float(in_order(parts)) for parts in self._gathered]


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Rank, Rank]:
    wire = Wire()
    first, second = (Rank(wire, rank, tmp_path / "store", monkeypatch) for rank in range(2))
    return first, second


def test_exchanges_meet_in_the_order_in_which_they_were_queued(ranks: tuple[Rank, Rank]) -> None:
    first, second = ranks
    second.queue(10, 20)
    first.queue(1, 2)
    first.queue(3)
    second.queue(30)
    assert first.sums() == second.sums() == [11, 22, 33]


def test_behind_a_failed_step_other_exchanges_would_meet(ranks: tuple[Rank, Rank]) -> None:
    """Nobody is told: the sums of the next step are of what does not belong together. So an engine
    over a process group ends with a step that fails (tests/engine/steps/ranks/test_ends.py)."""
    first, second = ranks
    first.queue(1)  # and fails, before its second layer
    second.queue(10, 20)
    for one, values in ((first, (3, 4)), (second, (30, 40))):
        one.queue(*values)
    assert first.sums() == [11, 23, 34]
    assert not first.ranks.begins_again
