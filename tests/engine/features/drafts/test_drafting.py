"""Drafts take what a step has left, and leave nothing behind where they fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduling import BLOCK, Seer, World

from vlm_serve.engine.core.executor import RowsAfter, StepError
from vlm_serve.engine.core.slicing import max_drafts
from vlm_serve.engine.requests.plan import StepPlan

MOST = 5
ALONE = 11
"""Drafts of a sequence while the other one that may run does not."""


def world(num_blocks: int = 30, *, interval: int = 0, budget: int = 100, wrong: int = 100) -> World:
    return World(
        num_blocks,
        drafter=Seer(wrong),
        changes={
            "speculative_tokens": MOST,
            "decode_state_interval": interval,
            "max_num_batched_tokens": budget,
        },
    )


def kinds(plan: StepPlan) -> list[tuple[str, int]]:
    return [(item.kind, item.end - item.start) for item in plan.slices]


def test_a_sampled_token_and_its_drafts_are_one_slice() -> None:
    one = world()
    group = one.submit(5, 10, 30)
    one.run(one.plan())
    plan = one.plan()
    assert kinds(plan) == [("verify", ALONE + 1)]
    assert [task.position for task in plan.slices[0].samples] == list(range(1, ALONE + 2))
    deltas = one.run(plan)
    assert len(deltas) == ALONE + 1
    (sequence,) = group.sequences
    assert sequence.pending == ALONE + 1 and sequence.num_computed == sequence.num_tokens - 1
    assert group.usage.accepted_prediction_tokens == ALONE
    assert one.plan().slices[0].pending == ALONE + 1


def test_what_did_not_hold_gives_its_blocks_back() -> None:
    one = world(wrong=1)
    group = one.submit(5, BLOCK - 2, 30)
    one.run(one.plan())
    before = one.cache.free_block_count
    plan = one.plan()
    assert len(plan.slices[0].blocks) == 3 and one.cache.free_block_count == before - 2
    assert len(one.run(plan)) == 2
    assert one.cache.free_block_count == before
    assert group.sequences[0].pending == 2
    usage = group.usage
    assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (1, ALONE - 1)


def test_drafts_end_with_the_answer() -> None:
    one = world()
    group = one.submit(5, 10, 4)
    one.run(one.plan())
    assert kinds(one.plan()) == [("verify", 3)]
    one = world()
    group = one.submit(5, 10, 2)
    one.run(one.plan())
    assert kinds(one.plan()) == [("decode", 1)]
    assert group.sequences[0].pending == 0


def test_drafts_stop_before_a_state_that_is_to_be_kept() -> None:
    one = world(interval=BLOCK)
    one.submit(5, 10, 30)
    one.run(one.plan())
    plan = one.plan()
    assert kinds(plan) == [("verify", 5)]  # Tokens 10 to 14: the state after 16 is wanted.
    one.run(plan)
    plan = one.plan()
    assert kinds(plan) == [("decode", 1)] and plan.slices[0].end == 16
    assert plan.folds and plan.folds[0][2] == 5


def test_drafts_take_only_blocks_that_are_free() -> None:
    """Cached blocks of others stay, and nobody is preempted."""
    one = world(num_blocks=7)
    one.submit(6, 3 * BLOCK, 2)
    while one.scheduler.has_work:
        one.run(one.plan())
    first = one.submit(5, BLOCK, 12)
    one.run(one.plan())
    second, squeezed = one.submit(7, BLOCK, 12), 0
    while one.scheduler.has_work:
        had = {each: len(each.lease.blocks) for each in one.scheduler.running if each.lease}
        free, plan = one.cache.free_block_count, one.plan()
        for item in plan.slices:
            before = had.get(one.scheduler.queues[item.sequence], 0)
            if item.kind == "verify" and not free:
                blocks = item.first_block + len(item.blocks)
                assert blocks == max(before, -(-(item.start + 1) // BLOCK))
                squeezed += 1
        one.run(plan)
        one.cache.check()
    assert one.scheduler.num_preemptions == 0
    assert first.finished and second.finished and squeezed


def test_a_prefill_has_the_budget_before_drafts() -> None:
    one = world(budget=12)
    one.submit(5, 10, 30)
    one.run(one.plan())
    one.submit(6, BLOCK * 3, 5)
    plan = one.plan()
    assert sorted(kinds(plan)) == [("prefill", BLOCK), ("verify", 4)]


@pytest.mark.parametrize("fails", [True, False])
def test_a_preempted_row_is_folded_before_it_is_anyone_elses(fails: bool) -> None:
    """If the step that folds it fails, nobody knows what is in the row."""
    one = world()
    group = one.submit(5, 10, 30)
    one.run(one.plan())
    one.run(one.plan())
    (sequence,) = group.sequences
    queues = one.scheduler.queues
    queues.preempt(sequence)
    assert sequence.suspended is not None and sequence.pending == 0 and len(queues.folds) == 1
    plan = one.plan()
    ((row, _, count),) = plan.folds
    assert (row, count) == (plan.slices[0].src_row, ALONE + 1)
    if fails:
        one.scheduler.fail(plan, StepError(RuntimeError(), "unknown"))
        assert sequence.lease is None and sequence.num_generated == ALONE + 2
    else:
        one.run(plan)
    while one.scheduler.has_work:
        one.run(one.plan())
    assert len(sequence.generated) == 30
    one.cache.check()


def test_an_evicted_row_is_not_folded() -> None:
    one = world()
    group = one.submit(5, 10, 30)
    one.run(one.plan())
    one.run(one.plan())
    (sequence,) = group.sequences
    one.scheduler.queues.preempt(sequence)
    assert sequence.suspended is not None
    one.cache.drop(sequence.suspended)
    assert not one.scheduler.queues.folds


def test_a_suspect_runs_without_drafts() -> None:
    one = world()
    group = one.submit(5, 10, 30)
    one.run(one.plan())
    plan = one.plan()
    one.scheduler.fail(plan, StepError(RuntimeError(), "unknown"))
    plan = one.plan()
    assert [item.kind for item in plan.slices] == ["prefill"]
    one.run(replace(plan))
    assert kinds(one.plan()) == [("verify", ALONE + 1)]
    assert group.sequences[0].suspect_until == 0


@pytest.mark.parametrize("rows", ["whole", "mixed", "folded", "unknown"])
@pytest.mark.parametrize("pending", [False, True])
def test_a_failed_step_of_drafts_goes_on_from_its_row(rows: RowsAfter, pending: bool) -> None:
    """Where it is known what is in it; else the sequence starts again from the cache."""
    one = world(wrong=0)
    group = one.submit(5, 10, 30)
    one.run(one.plan())
    if pending:
        one.run(one.plan())
    (sequence,) = group.sequences
    computed, plan = sequence.num_computed, one.plan()
    (item,) = plan.slices
    assert (item.kind, item.pending) == ("verify", int(pending))
    if rows == "folded" and pending:
        one.executor._fold(item.dst_row, item.updates, item.pending)
    one.scheduler.fail(plan, StepError(RuntimeError(), rows))
    stays = rows != "unknown" and not (rows == "mixed" and pending)
    assert (sequence.lease is not None) == stays
    plan = one.plan()
    assert [each.kind for each in plan.slices] == ["decode" if stays else "prefill"]
    assert plan.slices[0].end == computed + 1
    assert len(plan.folds) == (stays and pending and rows == "whole")
    one.run(plan)
    while one.scheduler.has_work:
        one.run(one.plan())
    assert len(sequence.generated) == 30
    one.cache.check()


def test_a_sequence_has_the_places_of_those_that_do_not_run() -> None:
    """And gives them back when they do, a step later, since its updates are pending there."""
    one = world()
    first = one.submit(5, BLOCK, 60)
    one.run(one.plan())
    assert kinds(one.plan()) == [("verify", ALONE + 1)]
    one.run(one.plan())
    second = one.submit(6, BLOCK, 40)
    plan = one.plan()
    assert sorted(kinds(plan)) == [("prefill", BLOCK), ("verify", MOST + 1)]
    assert plan.slices[0].pending == ALONE + 1
    one.run(plan)
    plan = one.plan()
    assert kinds(plan) == [("verify", MOST + 1), ("decode", 1)]
    one.run(plan)
    plan = one.plan()
    assert kinds(plan) == [("verify", MOST + 1)] * 2
    assert {item.updates for item in plan.slices} == {0, MOST + 1}
    one.run(plan)
    one.scheduler.end(second)
    one.run(one.plan())
    assert kinds(one.plan()) == [("verify", ALONE + 1)]
    while one.scheduler.has_work:
        one.run(one.plan())
    assert len(first.sequences[0].generated) == 60
    one.cache.check()


def test_choices_of_one_prompt_have_drafts_in_places_of_their_own() -> None:
    one = world(num_blocks=60)
    one.submit(5, BLOCK, 60)
    one.run(one.plan())
    one.run(one.plan())
    group = one.submit(6, BLOCK, 30, n=2)
    drafted = 0
    while one.scheduler.has_work:
        plan = one.plan()
        taken = list[int]()
        for item in plan.slices:
            if item.kind == "verify":
                count = max(item.end - item.start, item.pending)
                taken += range(item.updates, item.updates + count)
                drafted += item.sequence in {each.number for each in group.sequences}
        assert len(taken) == len(set(taken)) and max(taken, default=0) < 2 * (MOST + 1)
        one.run(plan)
    assert drafted


@pytest.mark.parametrize(
    ("most", "running", "sequences", "drafts"),
    [(7, 1, 8, 15), (7, 2, 8, 15), (7, 3, 8, 7), (7, 1, 2, 15), (7, 1, 1, 7), (20, 1, 8, 32)],
)
def test_most_drafts_while_few_run(most: int, running: int, sequences: int, drafts: int) -> None:
    assert max_drafts(most, running, sequences) == drafts
