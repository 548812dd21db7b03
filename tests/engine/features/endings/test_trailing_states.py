"""Answers that are computed with drafts leave the state of their last block boundary, too."""

from __future__ import annotations

import pytest
from scheduling import BLOCK, Seer, World
from simulated_turns import AnyTurn

from vlm_serve.engine.core.executor import RowsAfter, StepError
from vlm_serve.engine.requests.sequence import SequenceGroup

PROMPT = (5,) * 10


def world(wrong: int = 100) -> World:
    changes = {"answer_ends": "always", "speculative_tokens": 5}
    return World(30, snapshots=6, drafter=Seer(wrong), changes=changes)


def step(one: World, times: int) -> None:
    for _ in range(times):
        one.run(one.plan())
        one.cache.check()


def reused(one: World, group: SequenceGroup) -> int:
    """Return what a next prompt starts with."""
    said = group.sequences[0].generated
    later = one.ask((*PROMPT, *said, 40, 41), 1)
    while not later.finished:
        step(one, 1)
    return later.cached_tokens


@pytest.mark.parametrize("wrong", [100, 3, 1])
def test_an_abort_leaves_the_state_that_drafts_have_passed(wrong: int) -> None:
    one = world(wrong)
    group = one.ask(PROMPT, 60)
    sequence = group.sequences[0]
    while sequence.num_computed < 40:
        step(one, 1)
    # The updates of the last step are in no row yet; at a boundary they are folded in the end.
    length = sequence.num_computed
    boundary = (length - sequence.pending if length % BLOCK else length) // BLOCK * BLOCK
    assert boundary > len(PROMPT)
    one.scheduler.end(group)
    one.cache.check()
    assert reused(one, group) == boundary


def test_each_boundary_is_copied_once() -> None:
    one = world()
    group = one.ask(PROMPT, 60)
    copied = list[int]()
    while not group.finished:
        plan = one.plan()
        (item,) = plan.slices
        for fold in plan.partial_folds:
            assert 0 < fold.updates <= item.pending and fold.source == item.dst_row
            copied.append(item.start - item.pending + fold.updates)
        one.run(plan)
    assert copied and copied == sorted(set(copied))
    assert all(position % BLOCK == 0 for position in copied)


def test_the_boundary_serves_a_turn_that_shares_a_part() -> None:
    one = world(wrong=2)
    reports = list[object]()
    one.endings.ask = lambda sequence, report: reports.append(report)
    group = one.ask(PROMPT, 41, next_turn=AnyTurn())
    while not group.finished:
        step(one, 1)
    (report,) = reports
    report(len(PROMPT) + 38)  # type: ignore[operator]
    one.cache.check()
    assert reused(one, group) >= (len(PROMPT) + 38 - 3) // BLOCK * BLOCK


@pytest.mark.parametrize("rows", ["whole", "mixed", "folded", "unknown"])
def test_a_failed_step_leaves_no_state_of_a_boundary(rows: RowsAfter) -> None:
    """The sequence may keep its row, and is aborted before the next boundary."""
    one = world(wrong=3)
    group = one.ask(PROMPT, 60)
    (sequence,) = group.sequences
    while not (plan := one.plan()).partial_folds:
        one.run(plan)
    (fold,), (item,) = plan.partial_folds, plan.slices
    passed = item.start - item.pending + fold.updates
    one.scheduler.fail(plan, StepError(RuntimeError(), rows))
    one.cache.check()
    assert (sequence.lease is None) == (rows in ("mixed", "unknown"))
    assert sequence.lease is None or sequence.lease.trailing is None
    one.scheduler.end(group)
    one.cache.check()
    assert reused(one, group) < passed
