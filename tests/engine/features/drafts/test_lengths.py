"""How many drafts a step gets."""

from __future__ import annotations

import pytest

from vlm_serve.engine.features.drafts.base import MAX_EVIDENCE
from vlm_serve.engine.features.drafts.lengths import Acceptance, Candidate, CostCurve, depths, share

FREE = CostCurve()
LINEAR = CostCurve([(1, 1.0), (2, 2.0)])
STEPS = CostCurve([(1, 1.0), (4, 1.1), (5, 4.0), (8, 4.2)])


def trusting(rate: float) -> Acceptance:
    """As much whatever the evidence."""
    return Acceptance([rate] * (MAX_EVIDENCE + 1))


def lengths(
    *candidates: tuple[float, int], costs: CostCurve, rows: int = 0, budget: int = 100
) -> list[int]:
    decodes = len(candidates)
    offered = [Candidate(trusting(rate), count) for rate, count in candidates]
    rows = rows or decodes
    return share(offered, rows=rows, decodes=decodes, budget=budget, costs=costs)


def test_weak_evidence_gets_less_than_strong() -> None:
    """Drafts that are likely to hold once the first one has are worth more together."""
    acceptance = Acceptance([0.2, 0.9, *[0.95] * 6])
    costs = CostCurve([(1, 1.0), (9, 5.0)])
    for evidence, expected in ((0, 0), (1, 2), (2, 2)):
        candidate = Candidate(acceptance, 2, evidence)
        assert share([candidate], rows=1, decodes=1, budget=10, costs=costs) == [expected]


def test_rows_that_cost_nothing_are_all_used() -> None:
    assert lengths((0.9, 7), (0.1, 3), costs=FREE) == [7, 3]


def test_rows_that_cost_as_much_as_tokens_bring_are_not() -> None:
    assert lengths((0.99, 7), costs=LINEAR) == [0]


def test_the_likeliest_come_first_and_a_jump_in_costs_ends_them() -> None:
    assert lengths((0.9, 7), costs=STEPS) == [3]
    assert lengths((0.9, 7), (0.5, 7), costs=STEPS) == [2, 0]
    assert lengths((0.9, 7), (0.5, 7), costs=FREE, budget=3) == [3, 0]


def test_sequences_with_states_to_read_are_dear_already_so_drafts_are_not() -> None:
    """Eight rows of eight sequences take longer than of one, and a second row each adds less."""
    points = [(1, 1.0), (8, 1.7), (16, 2.5)]
    candidates = [(0.3, 1)] * 8
    assert lengths(*candidates, costs=CostCurve(points)) == [0] * 8
    several = CostCurve(points, sequence=0.2, tokens=8)
    assert lengths(*candidates, costs=several) == [1] * 8
    assert several.seconds(8, 8) == pytest.approx(1.7 + 7 * 0.2)
    assert several.seconds(16, 8) == pytest.approx(2.5 + 6 * 0.2)
    assert several.seconds(16, 1) == several.seconds(16) == 2.5
    sure = [trusting(0.3) for _ in range(8)]
    assert depths(sure, [1] * 8, costs=CostCurve(points), pass_costs=None) == [0] * 8
    assert depths(sure, [1] * 8, costs=several, pass_costs=None) == [1] * 8


def test_a_prefill_beside_makes_rows_dearer() -> None:
    curve = CostCurve([(1, 1.0), (8, 1.05), (100, 9.0)])
    assert lengths((0.9, 7), costs=curve) == [7]
    assert lengths((0.9, 7), costs=curve, rows=93) > [0]


def test_steps_that_run_from_graphs_without_drafts_are_worth_many() -> None:
    """A step from a graph takes 5, any other 20, whatever its rows."""
    graphs = CostCurve([(1, 20.0), (64, 20.0)], tokens=8, plain=[(1, 5.0), (8, 5.0)])
    assert graphs.seconds(8, 8) == 5 and graphs.seconds(9, 8) == 20 and graphs.seconds(8) == 20
    assert lengths((0.99, 7), costs=graphs) == [7]
    assert lengths((0.6, 7), costs=graphs) == [0]
    assert lengths((0.99, 7), costs=graphs, rows=30) == [0]
    assert depths([trusting(0.6)], [7], costs=graphs, pass_costs=None) == [0]


def test_a_sequence_that_lost_trust_is_tried_again_ever_more_rarely() -> None:
    acceptance, tries = Acceptance(), []
    for step in range(600):
        (given,) = share([Candidate(acceptance, 7)], rows=1, decodes=1, budget=10, costs=LINEAR)
        if given:
            assert given == 1
            tries.append(step)
            acceptance.learn(given, 0)
    waits = [after - before for before, after in zip(tries, tries[1:], strict=False)]
    assert waits == sorted(waits) and waits[-1] == 256
    acceptance.learn(1, 1)
    assert acceptance.pause == 8


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 1.0), (2, 1.0333), (4, 1.1), (6, 4.0667), (11, 4.4)]
)
def test_costs_between_and_beyond_what_was_measured(rows: int, seconds: float) -> None:
    assert STEPS.seconds(rows) == pytest.approx(seconds, abs=1e-4)


def test_the_models_own_layer_drafts_as_many_in_a_row_as_pay() -> None:
    """Where rows cost nothing, and passes a tenth of a step, three, or nothing."""
    sure, flat = trusting(0.8), CostCurve([(1, 1.0)])
    assert depths([sure], [7], costs=flat, pass_costs=CostCurve([(1, 0.1)])) == [6]
    assert depths([sure], [7], costs=flat, pass_costs=CostCurve([(1, 0.3)])) == [3]
    assert depths([sure], [7], costs=flat, pass_costs=None) == [7]
    assert depths([sure, sure], [7, 2], costs=flat, pass_costs=None) == [7, 2]
    assert depths([], [], costs=flat, pass_costs=None) == []


def test_a_layer_that_does_not_pay_is_tried_now_and_then() -> None:
    acceptance, costs = trusting(0.05), CostCurve([(1, 1.0), (2, 2.0)])
    found = [
        depths([acceptance], [7], costs=costs, pass_costs=CostCurve([(1, 0.5)]))[0]
        for _ in range(9)
    ]
    assert found[:6] == [0] * 6 and found[-1] == 1
    acceptance.learn(1, 0)
    assert depths([acceptance], [7], costs=costs, pass_costs=None) == [0]
