"""Requests that wait for a running prefill instead of computing the same tokens."""

from __future__ import annotations

from typing import Any

from join_watch import JoinWatch
from scheduling import BLOCK, World
from symbolic import SymbolicMedia, make_prompt

from vlm_serve.cache.placement import MAX_NEW_SNAPSHOTS
from vlm_serve.engine.core.executor import StepError
from vlm_serve.engine.features.joins import MAX_FRUITLESS_JOINS, MAX_IDLE_STEPS
from vlm_serve.engine.requests.plan import StepPlan
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.preprocess.identity.prompt import Prompt

DOCUMENT = tuple(range(5, 45)) * 2
"""80 tokens: 10 blocks."""


class Askers(World):
    """Requests with a common beginning; every step is checked."""

    def __init__(
        self, *, seats: int = 8, budget: int = 100, interval: int = BLOCK, snapshots: int = 20
    ) -> None:
        changes = {
            "max_num_seqs": seats,
            "max_num_batched_tokens": budget,
            "state_interval": interval,
        }
        super().__init__(num_blocks=200, snapshots=snapshots, changes=changes)
        self.watch = JoinWatch(self.scheduler, self.features)

    def question(
        self, token: int, before: tuple[int, ...] = DOCUMENT, **options: Any
    ) -> SequenceGroup:
        return self.submit(token, **{"length": 5, "max_tokens": 1, "before": before, **options})

    def step(self) -> StepPlan:
        plan = self.plan()
        self.watch.check(committed=False)
        self.run(plan)
        self.watch.check(committed=True)
        self.cache.check()
        return plan

    @property
    def joined(self) -> int:
        return len(self.joins)

    def finish(self) -> int:
        """Everything to its end; returns the tokens computed."""
        before = self.executor.tokens_computed
        for _ in range(200):
            if not self.scheduler.has_work:
                return self.executor.tokens_computed - before
            self.step()
        raise AssertionError("it never ends")


def tokens(plan: StepPlan) -> list[int]:
    return [item.end - item.start for item in plan.slices]


def test_what_is_asked_at_once_is_computed_once() -> None:
    world = Askers()
    groups = [world.question(token) for token in range(30, 38)]
    assert tokens(world.step()) == [85], "one computes the document"
    assert sorted(tokens(world.step())) == [5] * 7, "the others their questions"
    assert world.watch.counts["joins"] == 7
    assert [group.cached_tokens for group in groups] == [0, *[80] * 7]
    reports = [group.report for group in groups]
    assert [each.joined_tokens for each in reports if each is not None] == [0, *[80] * 7]
    assert all(each is not None and each.joined_ms > 0 for each in reports[1:])
    stats = world.cache.stats
    assert (stats.joined_requests, stats.joined_tokens) == (7, 560) and stats.joined_ms > 0


def test_they_wait_without_a_seat_until_the_leader_has_passed_the_fork() -> None:
    """The leader needs three steps; the fork lies in the second one."""
    world = Askers(budget=48)
    world.question(30, length=40)
    follower = world.question(31)
    assert len(world.step().slices) == 1 and world.joined == 1
    assert world.scheduler.running[0].num_computed == 48
    world.step()
    assert world.joined == 0, "the cut at 80 was passed"
    plan = world.step()
    number = follower.sequences[0].number
    assert [item.start for item in plan.slices if item.sequence == number] == [80]


def test_forks_at_two_depths_have_a_leader_each() -> None:
    world = Askers(budget=400)
    branches = [(*DOCUMENT, *[token] * 40) for token in (20, 21)]
    for token in range(30, 34):
        for branch in branches:
            world.question(token, before=branch)
    assert world.finish() == 80 + 2 * 40 + 8 * 5


def test_the_fork_stands_outside_of_the_limit_of_a_prompts_snapshots() -> None:
    world = Askers(snapshots=40)
    leader = world.question(30, length=80, before=DOCUMENT * 2)
    world.step()
    regular = set(leader.sequences[0].snapshot_positions)
    cut = next(cut for cut in range(136, 216, BLOCK) if cut not in regular)
    assert len(regular) == MAX_NEW_SNAPSHOTS
    follower = world.question(31, before=(*DOCUMENT * 2, *[30] * 60)[:cut])
    plan = world.plan()
    assert set(leader.sequences[0].snapshot_positions) == {cut, *regular}
    world.run(plan)
    world.finish()
    assert follower.cached_tokens == cut


def test_a_follower_that_leaves_takes_its_cut_and_its_priority_along() -> None:
    world = Askers(budget=48, interval=10_000)
    leader = world.question(30, length=200, priority=5)
    world.step()
    follower = world.question(31, before=(*DOCUMENT, *[30] * 100), priority=-3)
    world.step()
    sequence = leader.sequences[0]
    assert sequence.priority == -3 and sequence.snapshot_positions[176] == "junction"
    world.scheduler.end(follower)
    world.watch.check(committed=False)
    assert sequence.priority == 5 and 176 not in sequence.snapshot_positions


def test_a_fork_before_the_gain_is_not_worth_a_wait() -> None:
    world = Askers()
    world.question(30, before=DOCUMENT[:24])
    world.question(31, before=DOCUMENT[:24])
    assert sorted(tokens(world.step())) == [29, 29]


def test_when_the_leader_is_aborted_the_next_one_leads_from_where_it_came() -> None:
    world = Askers(budget=48)
    leader = world.question(30)
    others = [world.question(token) for token in (31, 32)]
    world.step()
    world.scheduler.end(leader)
    assert world.joined == 0
    world.step()
    assert world.watch.counts["joins"] == 3, "the last one joins the new leader"
    world.finish()
    assert [group.cached_tokens for group in others] == [48, 80]


def test_when_the_leaders_step_fails_every_follower_is_admissible_at_once() -> None:
    world = Askers(budget=48)
    world.question(30)
    for token in (31, 32):
        world.question(token)
    world.step()
    plan = world.plan()
    world.executor.fail_next = True
    try:
        world.executor.run(plan)
    except StepError as error:
        world.scheduler.fail(plan, error)
    assert world.joined == 0
    world.watch.check(committed=False)
    assert world.finish() <= 85 + 5 + 5


def test_who_was_failed_by_every_leader_computes_for_itself() -> None:
    world = Askers(budget=16)
    follower = world.question(40, priority=1)
    for token in range(MAX_FRUITLESS_JOINS + 2):
        leader = world.question(30 + token)
        world.plan()
        assert world.scheduler.running == [leader.sequences[0]] or token > MAX_FRUITLESS_JOINS
        world.scheduler.end(leader)
    world.plan()
    assert follower.sequences[0] in world.scheduler.running


def test_a_leader_that_makes_no_progress_is_left() -> None:
    world = Askers(budget=16)
    world.question(30)
    world.step()
    follower = world.question(31)
    joins = world.joins
    world.plan()
    assert world.joined == 1
    for _ in range(MAX_IDLE_STEPS):
        assert world.joined == 1
        joins.settle()
    assert world.joined == 0 and follower.sequences[0] in world.scheduler.waiting


def test_cold_runs_neither_lead_nor_follow() -> None:
    world = Askers(budget=400)
    joins = world.joins
    world.question(30, cold=True)
    world.question(31)
    world.question(32, cold=True)
    world.plan()
    assert len(world.scheduler.running) == 3 and not joins


def test_where_no_row_is_free_for_the_fork_nobody_waits() -> None:
    """Two seats, no snapshot rows: the second seat's row is all there is."""
    world = Askers(seats=2, snapshots=0)
    world.question(7, before=(), length=20, max_tokens=20)
    world.step()
    world.question(30)
    world.question(31)
    world.plan()
    assert world.joined == 0, "both rows are live"


def test_a_request_that_is_aborted_leaves_the_state_that_its_step_left() -> None:
    """No place for a snapshot lies in the first slice; its row is one."""
    world = Askers(budget=48, interval=10_000)
    leader = world.question(30)
    world.step()
    world.scheduler.end(leader)
    assert world.cache.stats.saves == {"left": 1}
    follower = world.question(31)
    world.finish()
    assert follower.cached_tokens == 48


def test_an_answer_that_ends_at_a_cut_leaves_its_state() -> None:
    world = Askers(interval=10_000)
    world.question(30, length=3, max_tokens=6)
    world.finish()
    assert world.cache.stats.saves["left"] == 1, "88 tokens have been computed"


def test_a_row_whose_step_has_failed_is_no_state() -> None:
    world = Askers(budget=48, interval=10_000)
    group = world.question(30)
    world.executor.poisonous.add(group.sequences[0].number)
    for _ in range(2):
        plan = world.plan()
        try:
            world.executor.run(plan)
        except StepError as error:
            world.scheduler.fail(plan, error)
    assert not world.scheduler.has_work and not world.cache.stats.saves


def test_a_fork_whose_row_is_not_copied_yet_leaves_none() -> None:
    world = Askers(interval=10_000)
    group = world.question(30, length=8, max_tokens=8, n=2)
    world.run(world.plan())
    world.scheduler.end(group)
    world.cache.check()
    rows = {row for row in range(28) if world.executor.rows[row]}
    ready = [s.snapshot.row for s in world.cache.nodes() if s.snapshot is not None]
    assert set(ready) <= rows, "a snapshot of a row that nobody wrote"


def picture(*, ready: bool) -> SymbolicMedia:
    return SymbolicMedia("image", (1, 2, 2), ready, (bytes(31) + b"p",), ready=ready)


def about(item: SymbolicMedia, question: int, *, before: int = 40) -> Prompt:
    """Text, a picture, more text that all share, and a question."""
    return make_prompt([DOCUMENT[:before], item, DOCUMENT[:40], (question,) * 5], block_size=BLOCK)


def test_who_has_the_pixels_does_not_wait_for_who_has_not() -> None:
    """It waits for the text before the picture only."""
    world = Askers(budget=200)
    world.send(about(picture(ready=False), 20), max_tokens=1)
    plan = world.plan()
    assert tokens(plan) == [40] and world.scheduler.queues.media.loading, "it waits for pixels"
    follower = world.send(about(picture(ready=True), 21), max_tokens=1)
    world.plan()
    assert [join.cut for join in world.joins.all] == [40]
    assert follower.sequences[0].lease is None


def test_who_lacks_the_pixels_too_waits_for_who_decodes_them() -> None:
    world = Askers(budget=200)
    leader = about(picture(ready=False), 20)
    world.send(leader, max_tokens=1)
    plan = world.plan()
    assert tokens(plan) == [40]
    follower = world.send(about(picture(ready=False), 21), max_tokens=1)
    world.run(plan)
    assert world.scheduler.plan() is None, "both wait for the picture"
    (join,) = world.joins.all
    assert join.cut > 48 and follower.sequences[0].lease is None


def album(question: int, pictures: int) -> Prompt:
    """Text, one picture or two, and a question."""
    items = [
        SymbolicMedia("image", (1, 2, 2), True, (bytes(31) + b"pq"[number : number + 1],))
        for number in range(pictures)
    ]
    return make_prompt([DOCUMENT[:40], *items, (question,) * 5], block_size=BLOCK)


def test_behind_a_medium_little_gain_is_enough() -> None:
    """One after the other the last one finds the state there, too."""
    world = Askers()
    world.send(album(20, 1), max_tokens=1)
    groups = [world.send(album(question, 2), max_tokens=1) for question in (21, 22, 23)]
    assert tokens(world.step()) == [53]
    assert tokens(world.step()) == [13], "one computes the second picture"
    assert tokens(world.step()) == [5, 5]
    assert [group.cached_tokens for group in groups] == [48, 56, 56]


def test_who_would_be_there_first_does_not_wait() -> None:
    world = Askers(budget=24)
    world.send(album(20, 1), max_tokens=1)
    world.finish()
    world.send(album(21, 2), max_tokens=1, prompt_logprobs=1)
    plan = world.plan()
    assert tokens(plan) == [24], "it computes what the cache has, too"
    world.run(plan)
    late = world.send(album(22, 2), max_tokens=1)
    world.step()
    assert world.joined == 0 and late.sequences[0].num_cached == 48


def test_a_leader_that_comes_to_a_stall_lets_those_go_who_can_go_on() -> None:
    world = Askers(budget=200)
    world.send(about(picture(ready=False), 20), max_tokens=1)
    follower = world.send(about(picture(ready=True), 21), max_tokens=1)
    plan = world.plan()
    assert world.joined == 1
    world.run(plan)
    plan = world.plan()
    assert world.joined == 0 and follower.sequences[0].num_cached == 40
    world.run(plan)
    assert world.executor.tokens_computed == 40 + len(follower.request.prompt) - 40


def test_where_experts_must_be_complete_only_a_leader_that_records_them_helps() -> None:
    for records in (False, True):
        world = Askers(budget=200)
        prompts = [make_prompt([DOCUMENT, (token,) * 5], block_size=BLOCK) for token in (30, 31)]
        world.send(prompts[0], max_tokens=1, return_routed_experts=records)
        world.send(prompts[1], max_tokens=1, return_routed_experts=True, complete_experts=True)
        world.plan()
        assert world.joined == records


def test_a_prompt_whose_rows_are_reported_joins_no_deeper_than_they_allow() -> None:
    world = Askers(budget=200)
    world.question(30)
    world.question(31, prompt_logprobs=1)
    world.question(32, prompt_logprobs=1, prompt_logprobs_start=61)
    world.plan()
    (join,) = world.joins.all
    assert join.cut == 56, "the row of token 61 is computed at token 60"


def test_the_use_that_is_about_to_come_keeps_the_state_up() -> None:
    """One seat is free when the leader ends: the first follower takes it, the others wait."""
    world = Askers(seats=3, budget=200)
    for token in (5, 6):
        world.question(token, before=(), length=8, max_tokens=20)
    world.question(30)
    for token in (31, 32, 33):
        world.question(token)
    world.step()
    world.step()
    (node,) = [node for node in world.cache.nodes() if node.end == 80 and node.expected]
    assert node.expected == 2 and node.snapshot is not None and node.snapshot.hits == 1
    world.finish()
    assert node.expected == 0 and node.snapshot is not None and node.snapshot.hits == 3


def test_audits_do_not_make_way_for_those_who_wait_for_a_prefix() -> None:
    world = Askers(budget=48)
    world.question(30)
    world.question(31)
    world.step()
    assert len(world.joins) == 1 and not world.scheduler.has_idle_callers
