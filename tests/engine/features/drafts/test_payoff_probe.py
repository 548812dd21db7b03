"""Whether something pays is found out by doing it."""

from __future__ import annotations

import random

import pytest

from vlm_serve.engine.features.drafts.drafting import PROBED_STEPS, PayoffProbe


def ways(
    probe: PayoffProbe, steps: int, with_it: float, without: float, seed: int = 0
) -> list[bool]:
    """How steps are made that cost about so much; now and then one takes far longer."""
    rng, made = random.Random(seed), []
    for _ in range(steps):
        made.append(probe.on)
        cost = with_it if probe.on else without
        probe.learn(cost * rng.uniform(0.9, 1.1) * (50 if rng.random() < 0.02 else 1), 1.0)
    return made


@pytest.mark.parametrize(("with_it", "pays"), [(0.7, True), (1.5, False)])
def test_the_cheaper_way_is_taken_and_the_other_one_tried_ever_more_rarely(
    with_it: float, pays: bool
) -> None:
    made = ways(PayoffProbe(), 20_000, with_it, 1.0)
    assert (
        made[:PROBED_STEPS] == [True] * PROBED_STEPS
        and made[PROBED_STEPS : 2 * PROBED_STEPS] == [False] * PROBED_STEPS
    )
    assert made.count(not pays) < 0.02 * len(made)
    tries = [at for at in range(1, len(made)) if made[at] != made[at - 1] and made[at] != pays]
    waits = [after - before for before, after in zip(tries, tries[1:], strict=False)]
    assert waits == sorted(waits) and waits[-1] > 4 * waits[0]


def test_more_tokens_a_step_count() -> None:
    probe = PayoffProbe()
    for _ in range(4 * PROBED_STEPS):
        probe.learn(1.5 if probe.on else 1.0, 2.0 if probe.on else 1.0)
    assert probe.on


def test_what_changes_is_found_out() -> None:
    probe = PayoffProbe()
    assert not ways(probe, 1000, 1.5, 1.0)[-1]
    assert ways(probe, 2000, 0.5, 1.0)[-1]
