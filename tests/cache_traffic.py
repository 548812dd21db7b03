"""Seeded random traffic for the prefix cache alone: one seed, one history."""

from __future__ import annotations

import random
from collections.abc import Callable

from cache_texts import END_OF_TURN, Image, Segment, Text
from cache_world import World

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.logprobs import WantedRows

SEGMENTS: list[Segment] = [
    [5],
    Image("cat", 3),
    [5, 6, 7, 8, 9],
    [6, END_OF_TURN],
    Image("dog", 3),
    [8, 9, 10],
    Image("cat", 7),
    [12] * 6,
]
MAX_RUNS = 3


def random_world(seed: int) -> World:
    rng = random.Random(seed)
    return World(
        CacheConfig(
            num_blocks=rng.choice([8, 12, 20]),
            block_size=4,
            num_live_rows=rng.randint(1, MAX_RUNS),
            num_snapshot_rows=rng.choice([0, 1, 4]),
            has_state=rng.random() < 0.8,
            enabled=rng.random() < 0.95,
            min_snapshot_gain=2,
            ghost_entries=rng.choice([None, 0, 5]),
            logprob_bytes=rng.choice([0, 1000, 1 << 20]),
        )
    )


def drive(seed: int, steps: int) -> World:
    """Runs `steps` random operations with a full check after each."""
    world = random_world(seed)
    drive_with(world, seed, steps, world.check)
    return world


def drive_with(world: World, seed: int, steps: int, after_each: Callable[[], object]) -> None:
    """Runs `steps` random operations on a world of that seed."""
    rng, marks = random.Random(seed), random.Random(f"marks of {seed}")
    for _ in range(steps):
        _operate(world, rng, marks)
        after_each()


def _operate(world: World, rng: random.Random, marks: random.Random) -> None:
    choice = rng.random()
    if len(world.runs) < MAX_RUNS and choice < 0.3:
        _start(world, rng, marks)
    elif world.parked and choice < 0.35:
        index = rng.randrange(len(world.parked))
        if world.has_live_slot:
            world.resume(index)
        else:
            world.drop(index)
    elif choice < 0.36:
        world.cache.timed_pins.expire(rng.random())
    elif choice < 0.37:
        world.cache.flush()
    elif world.runs:
        _go_on(world, rng, choice)


def _start(world: World, rng: random.Random, marks: random.Random) -> None:
    few = SEGMENTS[: rng.choice([3, len(SEGMENTS)])]
    segments = [rng.choice(few) for _ in range(rng.randint(1, 5))]
    text = Text(*segments)
    text = Text(*segments, marks=[marks.randint(1, len(text)) for _ in range(marks.randint(0, 2))])
    world.start(
        text,
        first=rng.randint(1, len(text)),
        cold=rng.random() < 0.1,
        complete=rng.random() < 0.1,
        capture=rng.random() < 0.7,
        wants=WantedRows(rng.choice([1, 1, 1, len(text)]), rng.choice([0, 2, 5]))
        if rng.random() < 0.3
        else None,
    )


def _go_on(world: World, rng: random.Random, choice: float) -> None:
    run = rng.choice(world.runs)
    left = len(run.text) - run.lease.length
    if choice < 0.75:
        if not left:
            run.text.append(rng.choice([END_OF_TURN, 13, 14]))
        dense = rng.random()
        end = rng.randint(run.lease.length + 1, len(run.text))
        world.step(run, end, lambda position: rng.random() < dense)
    elif choice < 0.80 and left:
        world.fail(run, rng.randint(run.lease.length + 1, len(run.text)))
    elif choice < 0.85:
        world.suspend(run)
    elif choice < 0.88 and run.lease.committed and len(world.runs) < MAX_RUNS:
        world.fork(run)
    elif choice < 0.89:
        world.cache.pin(run.text.keys, rng.random())
    else:
        world.close(run)
