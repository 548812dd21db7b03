"""A small model in simulated traffic: a device behind the host computes what one at once does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from queued_device import FAULTS, broken
from sweeps import quick
from torch_twins import TorchSimulation

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 100
AHEAD = 1
"""A seed in whose traffic the host is often ahead, and most steps are captured ones."""
DRAFTING = 7
"""A seed with drafts, many of whose steps are captured ones."""
TOTALS: Counter[str] = Counter()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("twins")


@pytest.mark.parametrize("seed", quick(range(20), [AHEAD, 5, DRAFTING], pytest.mark.fuzz))
def test_both_devices_compute_the_same(seed: int, folder: Path) -> None:
    TOTALS.update(TorchSimulation(seed, folder, speculative=seed % 4 == 3).run(STEPS))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, folder: Path) -> None:
    """Stale tables name another block, row or token; or something that is no block at all."""
    with broken(fault), pytest.raises(Exception) as found:
        TorchSimulation(AHEAD, folder).run(STEPS)
    assert isinstance(found.value, (AssertionError, IndexError, ValueError, RuntimeError))


def test_the_traffic_was_worth_its_name(folder: Path) -> None:
    happens = ("steps ahead", "captured", "captured with drafts", "hit_tokens")
    if not all(TOTALS[what] for what in happens):
        TOTALS.update(TorchSimulation(AHEAD, folder).run(STEPS))
        TOTALS.update(TorchSimulation(DRAFTING, folder, speculative=True).run(STEPS))
    for what in happens:
        assert TOTALS[what] > 0, f"no {what}"
