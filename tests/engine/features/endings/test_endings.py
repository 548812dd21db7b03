"""The state at the end of an answer is kept where a next turn starts from it."""

from __future__ import annotations

import pytest
from scheduling import BLOCK, World
from simulated_turns import AnyTurn
from symbolic import END_OF_TURN, InjectedFailure

from vlm_serve.engine.core.executor import StepError
from vlm_serve.engine.features.endings.endings import LEAST_TOKENS
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup

PROMPT = (5,) * 10
LONG = (*range(6, 6 + LEAST_TOKENS), END_OF_TURN)
"""An answer that is long enough, and ends inside a block."""


def world(mode: str = "always", **changes: object) -> World:
    return World(30, snapshots=6, changes={"answer_ends": mode} | changes)


def answer(one: World, group: SequenceGroup) -> None:
    """Steps until every choice has ended."""
    while not group.finished:
        one.run(one.plan())
        one.cache.check()


def ask(one: World, answer_tokens: tuple[int, ...] = LONG, **options: object) -> SequenceGroup:
    """A question whose answer ends with an end-of-turn token."""
    forced = (answer_tokens,)
    return one.ask(PROMPT, len(answer_tokens) + 1, ignore_eos=False, forced=forced, **options)


def reused(one: World, *tokens: tuple[int, ...]) -> int:
    """What a next prompt starts with."""
    group = one.ask((*PROMPT, *sum(tokens, ()), 40, 41), 1)
    answer(one, group)
    return group.cached_tokens


def settle(one: World) -> int:
    """Steps until nothing is left; returns how many."""
    steps = 0
    while one.scheduler.has_work:
        one.run(one.plan())
        one.cache.check()
        steps += 1
    return steps


class Delayed:
    """Reports what next turns share when the test says so."""

    def __init__(self, one: World) -> None:
        self.reports: list[tuple[Sequence, object]] = []
        one.endings.ask = lambda sequence, report: self.reports.append((sequence, report))

    def report(self, shared: int) -> None:
        _, report = self.reports.pop(0)
        report(shared)  # type: ignore[operator]


def test_a_next_turn_starts_behind_the_token_that_ended_the_answer() -> None:
    one = world()
    group = ask(one)
    answer(one, group)
    assert not one.scheduler.running and len(one.cache.leases) == 1
    plan = one.plan()
    (item,) = plan.slices
    assert (item.kind, item.end - item.start, item.samples) == ("decode", 1, ())
    one.run(plan)
    assert not one.cache.leases and not one.scheduler.has_work
    assert one.scheduler.take_removed() == [group.sequences[0].number]
    assert reused(one, LONG) == len(PROMPT) + len(LONG)


def test_without_ends_of_answers_it_starts_at_the_prompt() -> None:
    one = world("off")
    answer(one, ask(one))
    assert settle(one) == 0
    assert reused(one, LONG) == BLOCK


def test_a_prompt_that_comes_before_the_state_waits_one_step_for_it() -> None:
    one = world()
    delayed = Delayed(one)
    answer(one, ask(one, next_turn=AnyTurn()))
    assert not one.scheduler.has_work, "nobody knows yet what the next turn shares"
    group = one.ask((*PROMPT, *LONG, 40, 41), 1)
    plan = one.plan()
    assert [item.kind for item in plan.slices] == ["decode"]
    one.run(plan)
    answer(one, group)
    assert group.cached_tokens == len(PROMPT) + len(LONG)
    delayed.report(0)  # too late to change anything
    one.cache.check()


def test_what_the_next_turn_does_not_share_is_not_computed() -> None:
    one = world()
    delayed = Delayed(one)
    answer(one, ask(one, next_turn=AnyTurn()))
    delayed.report(len(PROMPT) + 1)
    assert not one.scheduler.has_work and not one.cache.leases
    assert one.cache.stats.saves["answer_end"] == 0


def test_the_last_block_boundary_serves_a_turn_that_shares_a_part() -> None:
    one = world()
    delayed = Delayed(one)
    tokens = (*range(6, 26), END_OF_TURN)
    # One token a step: only a decode token leaves a state.
    group = one.ask(PROMPT, 21, ignore_eos=False, next_turn=AnyTurn(), forced=(tokens[:1],))
    answer(one, group)
    said = group.sequences[0].generated
    boundary = (len(PROMPT) + len(said) - 1) // BLOCK * BLOCK
    delayed.report(boundary + 1)
    assert settle(one) == 0 and not one.cache.leases
    assert reused(one, said) == boundary


def test_an_abort_leaves_the_state_of_the_last_block_boundary() -> None:
    one = world()
    group = one.ask(PROMPT, 30)
    for _ in range(12):
        one.run(one.plan())
    said = group.sequences[0].generated
    one.scheduler.end(group)
    one.cache.check()
    assert settle(one) == 0
    assert reused(one, said) == (len(PROMPT) + len(said) - 1) // BLOCK * BLOCK > len(PROMPT)


def test_updates_that_are_due_are_folded_in_a_step_of_their_own() -> None:
    """A replay is cut by its length exactly at a block boundary: its row lacks the updates."""
    one = world()
    length = 2 * BLOCK - len(PROMPT) + 1
    group = one.ask(PROMPT, length, forced=(tuple(range(6, 5 + length)),))
    answer(one, group)
    plan = one.plan()
    assert not plan.slices and plan.folds
    one.run(plan)
    assert not one.cache.leases
    assert reused(one, group.sequences[0].generated) == 2 * BLOCK


def test_a_failed_step_drops_the_state() -> None:
    one = world()
    answer(one, ask(one))
    plan = one.plan()
    one.executor.fail_next = True
    with pytest.raises(StepError) as failure:
        one.executor.run(plan)
    assert isinstance(failure.value.cause, InjectedFailure)
    assert one.scheduler.fail(plan, failure.value) == []
    one.cache.check()
    assert not one.cache.leases and not one.scheduler.has_work
    assert one.endings.num_dropped == 1
    assert reused(one, LONG) < len(PROMPT) + len(LONG)


def test_an_ending_gives_way_to_whom_it_blocks() -> None:
    """Two live rows and no other: an ending holds one, and two prompts need both."""
    one = World(30, snapshots=0, changes={"answer_ends": "always"})
    Delayed(one)
    answer(one, ask(one, next_turn=AnyTurn()))
    groups = [one.ask((token,) * 10, 3) for token in (30, 31)]
    one.run(one.plan())
    assert len(one.scheduler.running) == 2 and one.endings.num_dropped == 1
    for group in groups:
        answer(one, group)


def test_answers_of_few_tokens_cost_no_row() -> None:
    one = world("auto")
    for count in range(1, 6):
        answer(one, ask(one, (*range(6, 5 + count), END_OF_TURN)))
        assert settle(one) == 0
    answer(one, ask(one))
    assert settle(one) == 1


def test_the_prompt_s_own_state_goes_first_once_the_answer_s_end_is_there() -> None:
    one = World(30, snapshots=1, changes={"answer_ends": "always"})
    answer(one, ask(one))
    settle(one)
    kinds = {node.snapshot.kind: node.snapshot for node in one.cache.nodes() if node.snapshot}
    assert kinds["prompt_end"].expected == 0 and kinds["answer_end"].expected == 1
    answer(one, one.ask(tuple(range(20, 40)), 2))
    left = [node.snapshot for node in one.cache.nodes()]
    assert kinds["answer_end"] in left and kinds["prompt_end"] not in left


def test_no_more_sequences_are_ending_than_may_run() -> None:
    """The oldest gives way, but not to one that ends in the step that computes its state."""
    one = world(max_num_seqs=1)
    delayed = Delayed(one)
    first = ask(one, next_turn=AnyTurn())
    answer(one, first)
    second = one.ask((30,) * 10, 2 * BLOCK - 9, next_turn=AnyTurn())  # cut at a block boundary
    for _ in range(2 * BLOCK - 10):
        one.run(one.plan())
    delayed.report(first.sequences[0].num_tokens)
    plan = one.plan()
    assert len(plan.slices) == 2
    one.run(plan)
    one.cache.check()
    assert second.finished and one.cache.stats.saves["answer_end"] == 1
    assert one.endings.num_dropped == 0
    third = ask(one, (*range(20, 30), END_OF_TURN), next_turn=AnyTurn())
    answer(one, third)
    fourth = ask(one, (*range(30, 40), END_OF_TURN), next_turn=AnyTurn())
    answer(one, fourth)
    assert one.endings.num_dropped == 2
