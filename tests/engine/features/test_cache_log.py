"""The debug log says what each request found, what it started from and what it left."""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

import pytest
from scheduling import World
from symbolic import make_prompt

from vlm_serve.engine.features.cache_log import CacheLog

NAME = "vlm_serve.engine.features.cache_log"
PROMPT = make_prompt([tuple(range(1, 101))], block_size=8)


class Line(NamedTuple):
    what: str
    request: str
    boundary: int
    reason: str


def lines(caplog: pytest.LogCaptureFixture) -> list[Line]:
    form = re.compile(r"(\w+): request (\S+), boundary (\d+).* reason (\w+)")
    found = [form.fullmatch(record.message) for record in caplog.records if record.name == NAME]
    caplog.clear()
    return [Line(each[1], each[2], int(each[3]), each[4]) for each in found if each]


@pytest.fixture
def world(caplog: pytest.LogCaptureFixture) -> World:
    caplog.set_level(logging.DEBUG, NAME)
    return World(60, snapshots=20, changes={"max_num_batched_tokens": 32})


def run(world: World) -> None:
    while world.scheduler.has_work:
        world.run(world.plan())


def test_match_save_and_restore(world: World, caplog: pytest.LogCaptureFixture) -> None:
    first = world.send(PROMPT, max_tokens=3, ignore_eos=True).request.request_id
    run(world)
    cold, *saved = lines(caplog)
    assert cold == Line("match", first, 0, "cold")
    assert saved and all(each.what == "save" and each.request == first for each in saved)
    boundaries = {each.boundary: each.reason for each in saved}
    assert set(boundaries) >= set(world.cache.snapshot_positions(PROMPT.keys, 100))
    second = world.send(PROMPT, max_tokens=1).request.request_id
    run(world)
    match, restore, *_ = lines(caplog)
    assert match == Line("match", second, 96, "full")
    assert restore == Line("restore", second, 96, boundaries[96])


def test_a_preempted_request_goes_on_with_its_own_state(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    group = world.send(PROMPT, max_tokens=3, ignore_eos=True)
    for _ in range(2):
        world.run(world.plan())
    world.scheduler.queues.preempt(group.sequences[0])
    lines(caplog)
    world.run(world.plan())
    assert lines(caplog)[0] == Line("restore", group.request.request_id, 64, "suspended")
    run(world)


def test_a_state_that_a_request_leaves_at_its_end_is_its_own(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Name the request also where it hands over its live row when it has gone."""
    requests = {}
    for number in range(12):
        group = world.submit(number + 1, 20 + number, 30)
        requests[group.request.request_id] = group
        run(world)
    saved = [each for each in lines(caplog) if each.what == "save"]
    assert {each.request for each in saved} == requests.keys()
    assert any(each.boundary > 20 + 11 for each in saved), "there are ends of answers, too"


def test_without_the_debug_log_it_is_no_feature(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, NAME)
    assert World(60).features.get(CacheLog) is None
