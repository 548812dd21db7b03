"""Steps take no longer than others may be kept waiting, and short prompts overtake long ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scheduling import BLOCK, World

from vlm_serve.engine.core.planning import Pace
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.requests.plan import Encode, StepPlan


def step(tokens: int) -> StepPlan:
    world = World(num_blocks=200, changes={"max_num_batched_tokens": 1000})
    world.submit(5, length=tokens, max_tokens=1)
    plan = world.plan()
    assert plan.num_tokens == tokens
    return plan


def planned(plan: StepPlan) -> dict[int, int]:
    """Tokens by sequence."""
    return {item.sequence: item.end - item.start for item in plan.slices}


def test_there_is_no_limit_before_anything_is_known() -> None:
    assert Pace(0.025, 256).most(0) > 1 << 20


def test_the_limit_is_what_fits_into_the_time() -> None:
    pace = Pace(0.025, 10)
    for _ in range(30):
        pace.learn(step(400), 0.04)
    assert pace.most(0) == pytest.approx(250, abs=1)
    for _ in range(30):
        pace.learn(step(400), 0.4)
    assert pace.most(0) == pytest.approx(25, abs=1)


def test_steps_that_were_only_queued_say_nothing() -> None:
    """A GPU computes them while the next one is prepared, which then waits for both."""
    pace = Pace(0.025, 10)
    for _ in range(30):
        pace.learn(step(400), 0.002, awaited=False)
        pace.learn(step(400), 0.002, awaited=False)
        pace.learn(step(400), 0.12)
    assert pace.most(0) > 1 << 20
    for _ in range(30):
        pace.learn(step(400), 0.04)
    assert pace.most(0) == pytest.approx(250, abs=1)


def test_a_slow_step_among_many_changes_little() -> None:
    pace = Pace(0.025, 10)
    for _ in range(30):
        pace.learn(step(400), 0.04)
    pace.learn(step(400), 0.08)
    assert 180 < pace.most(0) < 250


def test_a_step_may_always_have_the_least() -> None:
    pace = Pace(0.025, 64)
    pace.learn(step(400), 60.0)
    assert pace.most(0) == 64


def test_no_target_is_no_limit() -> None:
    pace = Pace(0.0, 64)
    pace.learn(step(400), 60.0)
    assert pace.most(0) > 1 << 20


def test_few_tokens_and_encoded_media_teach_nothing() -> None:
    pace = Pace(0.025, 64)
    pace.learn(step(31), 60.0)
    plan = step(400)
    media = StepPlan(slices=plan.slices, encodes=(_encode(),))
    pace.learn(media, 60.0)
    assert pace.most(0) > 1 << 20


class Depth:
    """A processor on which a token takes 10 us and 5 ns for every token it looks back at."""

    def __init__(self, target: float = 0.025) -> None:
        self.pace = Pace(target, 64)

    def take(self, start: int, end: int) -> None:
        plan = step(end - start)
        moved = [replace(item, start=start, end=end) for item in plan.slices]
        self.pace.learn(replace(plan, slices=tuple(moved)), self.seconds(start, end))

    def seconds(self, start: int, end: int) -> float:
        return (end - start) * (10e-6 + 5e-9 * (start + end) / 2)


def test_a_token_deep_in_a_long_prompt_counts_as_what_it_takes() -> None:
    depth = Depth()
    for _ in range(10):
        for start in (0, 1000, 4000):
            depth.take(start, start + 900)
    for start in (0, 500, 3000, 20_000):
        fit = depth.pace.most(start)
        assert depth.seconds(start, start + fit) == pytest.approx(0.025, rel=0.02)


def test_of_equal_depths_nobody_can_tell_what_depth_costs() -> None:
    depth = Depth()
    for _ in range(30):
        depth.take(0, 900)
    assert depth.pace.most(0) == depth.pace.most(10_000)


def test_deep_tokens_that_cost_less_are_no_reason_for_longer_steps() -> None:
    """Others had the processor while the shallow ones were computed."""
    pace = Pace(0.025, 64)
    for _ in range(10):
        pace.learn(step(900), 0.03)
        deep = [replace(item, start=3000, end=3900) for item in step(900).slices]
        pace.learn(replace(step(900), slices=tuple(deep)), 0.01)
    assert pace.most(3000) == pace.most(0)


def test_depth_costs_no_more_than_it_can() -> None:
    """However little the shallow ones seem to have taken."""
    pace = Pace(0.025, 1)
    for _ in range(10):
        pace.learn(step(900), 1e-9)
        deep = [replace(item, start=3000, end=3900) for item in step(900).slices]
        pace.learn(replace(step(900), slices=tuple(deep)), 0.03)
    assert 0.03 < pace.most(3000) / pace.most(0) < 1


def _encode() -> Encode:
    return Encode(None, (1, 2, 2), 2, 0)  # type: ignore[arg-type]


CHANGES: dict[str, Any] = {
    "max_num_batched_tokens": 400,
    "step_seconds": 0.01,
    "min_step_tokens": 2 * BLOCK,
}


def slow_world(snapshots: int = 0, **changes: Any) -> World:
    """Steps of 40 tokens take as long as they are to."""
    world = World(num_blocks=400, snapshots=snapshots, changes=CHANGES | changes)
    for _ in range(30):
        world.scheduler.pace.learn(step(400), 0.1)
    return world


def test_who_is_alone_has_four_times_the_least() -> None:
    world = slow_world()
    world.submit(5, length=600, max_tokens=1)
    assert world.plan().num_tokens == 64


def test_without_a_target_a_step_has_all() -> None:
    world = slow_world(step_seconds=0.0)
    world.submit(5, length=600, max_tokens=1)
    world.submit(6, length=600, max_tokens=1)
    assert world.plan().num_tokens == 400


def test_a_slice_deep_in_a_long_prompt_is_shorter() -> None:
    world = World(num_blocks=1000, changes=CHANGES)
    for _ in range(10):
        for start in (0, 1000):
            items = [replace(each, start=start, end=start + 100) for each in step(100).slices]
            seconds = 0.025 if start == 0 else 0.075
            world.scheduler.pace.learn(replace(step(100), slices=tuple(items)), seconds)
    long = world.submit(5, length=1200, max_tokens=1).sequences[0].number
    world.submit(6, length=1200, max_tokens=1)
    taken: list[int] = []
    while not taken or sum(taken) < 1200:
        plan = world.plan()
        taken.append(planned(plan).get(long, 0))
        world.run(plan)
    assert taken[0] == 40
    assert taken[1] == 16, "a look at what waits"
    assert taken[2] == 32
    assert taken[-5:-1] == [16] * 4


def test_beside_others_a_step_keeps_to_its_time() -> None:
    world = slow_world()
    world.submit(5, length=600, max_tokens=1)
    world.submit(6, length=600, max_tokens=1)
    assert world.plan().num_tokens == 40


def test_beside_an_answer_a_step_keeps_to_its_time() -> None:
    world = slow_world()
    world.submit(5, length=8, max_tokens=100)
    world.run(world.plan())
    world.submit(6, length=600, max_tokens=1)
    assert sorted(planned(world.plan()).values()) == [1, 32]


def test_a_short_prompt_overtakes_the_rest_of_a_long_one() -> None:
    world = slow_world()
    long = world.submit(5, length=600, max_tokens=1)
    world.run(world.plan())
    short = world.submit(6, length=19, max_tokens=1)
    plan = world.plan()
    assert planned(plan) == {long.sequences[0].number: 16, short.sequences[0].number: 19}
    assert [delta.finish_reason for delta in world.run(plan)] == ["length"]


def test_a_much_shorter_one_gets_a_step_and_then_it_is_the_long_ones_turn() -> None:
    world = slow_world()
    long = world.submit(5, length=600, max_tokens=1).sequences[0].number
    world.run(world.plan())
    for length in (5, 4):
        short = world.submit(6, length=length, max_tokens=1).sequences[0].number
        plan = world.plan()
        assert planned(plan) == {short: length}
        assert [delta.finish_reason for delta in world.run(plan)] == ["length"]
        world.submit(7, length=600, max_tokens=1)
        plan = world.plan()
        assert planned(plan)[long] >= 16
        world.run(plan)


def test_a_long_prompt_overtakes_nothing() -> None:
    world = slow_world()
    first = world.submit(5, length=600, max_tokens=1)
    world.run(world.plan())
    second = world.submit(6, length=60, max_tokens=1)
    third = world.submit(7, length=19, max_tokens=1)
    assert planned(world.plan()).keys() == {first.sequences[0].number, third.sequences[0].number}
    assert second.sequences[0] in world.scheduler.waiting


def test_long_prompts_that_wait_cost_the_first_one_little() -> None:
    """After one look at them, the step is its own again."""
    world = slow_world()
    for token in (5, 6, 7):
        world.submit(token, length=600, max_tokens=1)
    taken: list[int] = []
    for _ in range(3):
        plan = world.plan()
        taken.append(plan.num_tokens)
        world.run(plan)
    assert taken == [40, 16, 40]


def test_a_prefill_that_cannot_use_the_step_leaves_it_to_long_ones_too() -> None:
    """Few of its log-probabilities are computed at a time."""
    world = slow_world(reported_tokens=BLOCK)
    first = world.submit(5, length=600, max_tokens=1, prompt_logprobs=0)
    world.run(world.plan())
    second = world.submit(6, length=600, max_tokens=1)
    assert planned(world.plan()) == {first.sequences[0].number: 8, second.sequences[0].number: 32}


def test_what_is_left_after_a_hit_is_what_counts() -> None:
    world = slow_world(snapshots=20)
    world.submit(6, length=60, max_tokens=1)
    while world.scheduler.has_work:
        world.run(world.plan())
    long = world.submit(5, length=600, max_tokens=1)
    world.run(world.plan())
    again = world.submit(6, length=64, max_tokens=1)
    assert planned(world.plan()).keys() == {long.sequences[0].number, again.sequences[0].number}


def test_a_long_prompt_goes_on_however_many_overtake_it() -> None:
    world = slow_world()
    world.submit(5, length=600, max_tokens=1)
    world.run(world.plan())
    ends: list[Delta] = []
    steps = 0
    while not ends:
        for token in (6, 7, 8):
            world.submit(token, length=20, max_tokens=1)
        ends = [
            item
            for item in world.run(world.plan())
            if item.usage and item.usage.prompt_tokens == 600
        ]
        steps += 1
        assert steps < 40, "it starves"


def test_a_lower_priority_overtakes_nothing() -> None:
    world = slow_world()
    long = world.submit(5, length=600, max_tokens=1)
    world.run(world.plan())
    world.submit(6, length=8, max_tokens=1, priority=1)
    assert planned(world.plan()) == {long.sequences[0].number: 40}
