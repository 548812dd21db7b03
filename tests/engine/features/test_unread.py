"""Answers that nobody reads give up their seats, and lose nothing."""

from __future__ import annotations

from fair_world import FairWorld

from vlm_serve.engine.requests.tenant import Tenant

ALICE, MALLORY = Tenant("alice"), Tenant("mallory")


def test_an_unread_answer_waits_for_its_client() -> None:
    world, alone = FairWorld(2), FairWorld(2)
    assert world.unread is not None
    unread = world.ask(MALLORY, max_tokens=40, n=2)
    world.run(10)
    world.unread.hold(unread.group, held=True)
    beside = [world.ask(MALLORY) for _ in range(2)]
    world.run(20)
    assert all(each.ended for each in beside), "its seats are free"
    assert all(len(tokens) == 10 for tokens in unread.tokens.values())
    assert world.unread.is_busy(), "it is no request that does not fit"
    world.unread.hold(unread.group, held=False)
    assert not world.unread.is_busy()
    world.run(40)
    expected = alone.ask(MALLORY, max_tokens=40, n=2)
    alone.run(50)
    assert unread.tokens == expected.tokens
    assert world.computed["mallory"] == alone.computed["mallory"] + 2 * 27, "nothing was lost"


def test_who_is_held_has_no_turn_and_saves_none_up() -> None:
    world = FairWorld(2)
    assert world.unread is not None
    unread = world.ask(MALLORY, max_tokens=400)
    world.run(5)
    world.unread.hold(unread.group, held=True)
    for _ in range(4):
        world.ask(ALICE, max_tokens=400)
    world.run(300)
    world.computed.clear()
    world.unread.hold(unread.group, held=False)
    world.run(100)
    assert world.computed["mallory"] <= 101
    assert world.computed["alice"] >= 80


def test_an_aborted_one_is_forgotten() -> None:
    world = FairWorld(2)
    assert world.unread is not None
    unread = world.ask(MALLORY, max_tokens=400, n=3)
    world.run(5)
    world.unread.hold(unread.group, held=True)
    world.run(2)
    world.scheduler.end(unread.group)
    assert not (world.unread.is_busy() or world.scheduler.queues.held)
    world.unread.hold(unread.group, held=True)  # it came too late
    assert not world.scheduler.queues.held
