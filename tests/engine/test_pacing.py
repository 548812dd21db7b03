"""Steps take no longer than others may be kept waiting, and short prompts overtake long ones."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling import BLOCK, World

from vlm_serve.engine.outputs import Delta
from vlm_serve.engine.pacing import Pace
from vlm_serve.engine.plan import Encode, StepPlan


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
    assert Pace(0.025, 256).most > 1 << 20


def test_the_limit_is_what_fits_into_the_time() -> None:
    pace = Pace(0.025, 10)
    for _ in range(30):
        pace.learn(step(400), 0.04)
    assert pace.most == pytest.approx(250, abs=1)
    for _ in range(30):
        pace.learn(step(400), 0.4)
    assert pace.most == pytest.approx(25, abs=1)


def test_a_slow_step_among_many_changes_little() -> None:
    pace = Pace(0.025, 10)
    for _ in range(30):
        pace.learn(step(400), 0.04)
    pace.learn(step(400), 0.08)
    assert 180 < pace.most < 250


def test_a_step_may_always_have_the_least() -> None:
    pace = Pace(0.025, 64)
    pace.learn(step(400), 60.0)
    assert pace.most == 64


def test_no_target_is_no_limit() -> None:
    pace = Pace(0.0, 64)
    pace.learn(step(400), 60.0)
    assert pace.most > 1 << 20


def test_few_tokens_and_encoded_media_teach_nothing() -> None:
    pace = Pace(0.025, 64)
    pace.learn(step(31), 60.0)
    plan = step(400)
    media = StepPlan(slices=plan.slices, encodes=(_encode(),))
    pace.learn(media, 60.0)
    assert pace.most > 1 << 20


def _encode() -> Encode:
    return Encode(None, (1, 2, 2), 2, 0)  # type: ignore[arg-type]


CHANGES: dict[str, Any] = {
    "max_num_batched_tokens": 400,
    "step_seconds": 0.01,
    "least_step_tokens": 2 * BLOCK,
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


def test_a_long_prompt_overtakes_nothing() -> None:
    world = slow_world()
    first = world.submit(5, length=600, max_tokens=1)
    world.run(world.plan())
    second = world.submit(6, length=60, max_tokens=1)
    third = world.submit(7, length=5, max_tokens=1)
    assert planned(world.plan()).keys() == {first.sequences[0].number, third.sequences[0].number}
    assert second.sequences[0] in world.scheduler.waiting


def test_long_prompts_that_wait_cost_the_first_one_little() -> None:
    """After one look at them, the step is its own again."""
    world = slow_world()
    for token in (5, 6, 7):
        world.submit(token, length=600, max_tokens=1)
    taken = []
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
