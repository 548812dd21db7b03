"""Seeded traffic through the real scheduler and cache (see tests/simulation.py)."""

from __future__ import annotations

from collections import Counter

import pytest
from simulation import Simulation
from sweeps import quick

STEPS = 200
EVENTFUL = 34
"""A seed in whose traffic much happens that is rare."""
TOTALS: Counter[str] = Counter()
DRAFTED: Counter[str] = Counter()
REPLAYED: Counter[str] = Counter()


@pytest.mark.parametrize("seed", quick(range(100), [*range(10), EVENTFUL], pytest.mark.fuzz))
def test_random_traffic_keeps_every_promise(seed: int) -> None:
    TOTALS.update(Simulation(seed).run(STEPS))


@pytest.mark.parametrize("seed", quick(range(100), 10, pytest.mark.fuzz))
def test_drafts_keep_every_promise_too(seed: int) -> None:
    DRAFTED.update(Simulation(seed, speculative=True).run(STEPS))


@pytest.mark.parametrize("seed", quick(range(40), 10, pytest.mark.fuzz))
def test_replays_keep_every_promise_too(seed: int) -> None:
    simulation = Simulation(seed, speculative=seed % 2 == 0, replays=True)
    simulation.run(STEPS)
    counts = simulation.scheduler.replays.counts
    assert counts.disagreements == 0
    REPLAYED.update(counts.as_dict())


def test_a_finished_choice_gives_way_when_its_fork_is_preempted() -> None:
    """This seed ends a private request whose fork has yet to copy its row, then needs all blocks:
    preempting the fork has to free them at once."""
    counts = Simulation(3197).run(300)
    assert counts["cold"] and counts["steps"] >= 300


def test_the_traffic_was_worth_its_name() -> None:
    """Runs after the seeds: a simulation in which nothing happens proves nothing."""
    if not TOTALS:
        for seed in (*range(6), EVENTFUL):
            TOTALS.update(Simulation(seed).run(STEPS))
    if not DRAFTED:
        DRAFTED.update(Simulation(1, speculative=True).run(STEPS))
    if not REPLAYED:
        test_replays_keep_every_promise_too(1)
    assert REPLAYED["tokens"] > REPLAYED["requests"] > 0
    for what in ("drafts", "accepted drafts"):
        assert DRAFTED[what] > 0, f"no {what}"
    for what in (
        "hit_tokens",
        "aborts",
        "failures",
        "length",
        "stop",
        "expert answers",
        "came up",
        "rows reused",
        "overtaken",
    ):
        assert TOTALS[what] > 0, f"no {what}"
