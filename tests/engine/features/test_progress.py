"""How much of a prompt has been processed is told once a step, until its answer begins."""

from __future__ import annotations

from scheduling import World
from symbolic import make_prompt

from vlm_serve.engine.features.progress import Progress
from vlm_serve.engine.requests.outputs import Delta

BUDGET = {"max_num_batched_tokens": 32}


def run(world: World) -> int:
    """Run to the end; return the number of steps."""
    steps = 0
    while world.scheduler.has_work:
        world.run(world.plan())
        steps += 1
    return steps


def tokens_of(told: list[Delta]) -> list[int]:
    return [delta.progress.tokens for delta in told if delta.progress is not None]


def test_each_step_tells_once_and_reused_tokens_count() -> None:
    world, told, again = World(40, snapshots=20, changes=BUDGET), list[Delta](), list[Delta]()
    prompt = make_prompt([tuple(range(1, 101))], block_size=8)
    world.send(prompt, on_progress=told.append, max_tokens=3, ignore_eos=True)
    run(world)
    assert tokens_of(told) == [32, 64, 96, 100]
    assert all(not delta.token_ids and delta.usage.prompt_tokens == 100 for delta in told)
    seconds = [delta.progress.seconds for delta in told if delta.progress]
    assert seconds == sorted(seconds) and seconds[0] >= 0
    world.send(prompt, on_progress=again.append, max_tokens=1, n=3)
    run(world)
    assert tokens_of(again) == [100], "it was one step; other choices have no prompt of their own"
    assert again[0].usage.cached_tokens == 96


def test_a_preempted_prompt_is_never_told_to_have_shrunk() -> None:
    world, told = World(40, changes=BUDGET), list[Delta]()
    prompt = make_prompt([tuple(range(1, 101))], block_size=8)
    group = world.send(prompt, on_progress=told.append, max_tokens=3, ignore_eos=True)
    world.run(world.plan())
    world.run(world.plan())
    world.scheduler.queues.restart(group.sequences[0])
    run(world)
    assert tokens_of(told) == [32, 64, 96, 100]


def test_an_error_of_its_reader_is_the_readers() -> None:
    def refuse(delta: Delta) -> None:
        raise RuntimeError("the reader has gone")

    world = World(40, changes=BUDGET)
    prompt = make_prompt([tuple(range(1, 101))], block_size=8)
    group = world.send(prompt, on_progress=refuse, max_tokens=3, ignore_eos=True)
    run(world)
    assert len(group.sequences[0].generated) == 3


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    world, told = World(40, changes=BUDGET), list[Delta]()
    prompt = make_prompt([tuple(range(1, 101))], block_size=8)
    group = world.send(prompt, on_progress=told.append, max_tokens=3, n=2)
    world.run(world.plan())
    feature = world.features.get(Progress)
    assert feature is not None and len(feature._began) == 1
    world.scheduler.end(group)
    run(world)
    assert not (feature._began or feature._told) and tokens_of(told) == [32]
