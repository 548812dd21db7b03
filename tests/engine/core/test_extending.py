"""Steps that only extend the one before, and what makes a step more than that."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling import BLOCK, Seer, World

from vlm_serve.engine.core.executor import StepError
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.requests.plan import StepPlan

EXTENDS = {"extends_steps": True}


def ran(world: World, plan: StepPlan) -> list[Delta]:
    """Runs a step, of rows or slices, and commits it."""
    slices = plan.slices if plan.rows is None else plan.rows.slices(BLOCK)
    output = world.executor.run(StepPlan(slices))
    return [delta for _, delta in world.scheduler.commit(plan, output)]


def kinds(world: World, steps: int) -> list[str]:
    """Runs so many steps; returns of which kind each was."""
    found = []
    for _ in range(steps):
        plan = world.plan()
        found.append("slices" if plan.rows is None else "rows")
        ran(world, plan)
    return found


def test_answers_are_those_of_steps_of_slices() -> None:
    answers = []
    for changes in ({}, EXTENDS):
        world = World(30, changes=changes)
        groups = [world.submit(5, 11, 20), world.submit(6, 3, 9)]
        found = kinds(world, 20)
        assert ("rows" in found) is bool(changes)
        answers.append([group.sequences[0].generated for group in groups])
        assert not world.scheduler.has_work
        world.cache.check()
    assert answers[0] == answers[1] and [len(each) for each in answers[0]] == [20, 9]


def test_steps_of_rows_follow_until_something_happens() -> None:
    world = World(30, changes=EXTENDS)
    world.submit(5, 11, 30)
    assert kinds(world, 5) == ["slices", *["rows"] * 4]
    world.submit(6, 3, 4)
    # It is admitted, decodes with the other, and ends; the other goes on.
    assert kinds(world, 6) == ["slices", *["rows"] * 5]
    assert world.scheduler.extender.refusals == {"admission": 1}


REASONS: dict[str, dict[str, Any]] = {
    "choices": {"n": 2},
    "routed experts": {"return_routed_experts": True},
    "prompt log-probabilities": {"prompt_logprobs": 1},
    "replay": {"forced": ((7, 8, 9, 7, 8),)},
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_needs_the_results_of_the_step_before_is_named(reason: str) -> None:
    world = World(30, changes={"max_num_seqs": 3, **EXTENDS})
    world.submit(6, 11, 12)
    world.submit(5, 11, 6, **REASONS[reason])
    plan = world.plan()
    assert world.scheduler.plan_ahead(plan) is None
    assert world.scheduler.extender.refusals == {reason: 1}


def test_drafts_are_a_reason() -> None:
    world = World(30, drafter=Seer(), changes={"speculative_tokens": 2, **EXTENDS})
    world.submit(5, 11, 6)
    assert world.scheduler.plan_ahead(world.plan()) is None
    assert world.scheduler.extender.refusals == {"drafts": 1}


def test_a_prompt_that_goes_on_is_a_reason() -> None:
    world = World(30, changes={"max_num_batched_tokens": 20, **EXTENDS})
    world.submit(5, 40, 6)
    assert world.scheduler.plan_ahead(world.plan()) is None
    assert world.scheduler.extender.refusals == {"prompt": 1}


def test_who_ends_by_length_is_not_in_the_step_ahead() -> None:
    world = World(30, changes=EXTENDS)
    short, long = world.submit(5, 11, 4), world.submit(6, 11, 9)
    kinds(world, 3)
    plan = world.plan()
    ahead = world.scheduler.plan_ahead(plan)
    assert ahead is not None and ahead.rows is not None
    assert ahead.rows.sequences == (long.sequences[0].number,)
    assert ahead.rows.tokens is None
    ran(world, plan)
    assert short.finished and not long.finished


def test_a_queue_that_has_no_seat_does_not_stop_the_device() -> None:
    world = World(60, changes=EXTENDS)
    for token in (5, 6, 7, 8):
        world.submit(token, 11, 9)
    kinds(world, 3)
    assert world.scheduler.plan_ahead(world.plan()) is not None
    assert len(world.scheduler.waiting) == 2


def test_a_failure_makes_the_step_ahead_void() -> None:
    world = World(30, changes=EXTENDS)
    group = world.submit(5, 11, 6)
    expected = World(30)
    other = expected.submit(5, 11, 6)
    plan = world.plan()
    assert world.scheduler.plan_ahead(plan) is not None
    world.scheduler.fail(plan, StepError(RuntimeError("injected"), "unknown"))
    assert world.scheduler.queues.ahead == frozenset()
    kinds(world, 6)
    kinds(expected, 6)
    assert group.finished and group.sequences[0].generated == other.sequences[0].generated
    world.cache.check()


def test_an_abort_under_way_leaves_no_state_that_is_a_token_further() -> None:
    """The row would be a snapshot at a block's end; the step ahead has changed it."""
    world = World(30, snapshots=4, changes=EXTENDS)
    group = world.submit(5, BLOCK - 2, 30)
    kinds(world, 2)
    plan = world.plan()
    ran(world, plan)
    sequence = group.sequences[0]
    assert sequence.num_computed == BLOCK
    ahead = world.scheduler.plan_ahead(plan)
    assert ahead is not None
    world.scheduler.end(group)
    assert not world.cache.snapshot_positions(sequence.keys, BLOCK)
    world.cache.check()
