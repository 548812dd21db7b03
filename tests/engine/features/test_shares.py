"""Fair shares of the model: whose turn it is, and who gives up a seat."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
from fair_world import Asked, FairWorld
from sweeps import quick

from vlm_serve.engine.features.shares import LEAST_TURN, Shares
from vlm_serve.engine.requests.tenant import BACKGROUND, Tenant

ALICE, MALLORY, QUIET = Tenant("alice"), Tenant("mallory"), Tenant("quiet")
SEATS = 8
HOSTILE: dict[str, tuple[int, dict[str, Any]]] = {
    "30 requests with 8 choices": (30, {"n": 8, "max_tokens": 300}),
    "60 long streams": (60, {"max_tokens": 3000}),
    "200 connections": (200, {"max_tokens": 64}),
}
STEPS = 240


class Crowd:
    """A tenant that always has so many requests open.

    Attributes:
        asked: these requests.
    """

    def __init__(self, tenant: Tenant, count: int, what: dict[str, Any]) -> None:
        self._tenant, self._count, self._what = tenant, count, what
        self.asked: list[Asked] = []

    def ask(self, world: FairWorld) -> None:
        self.asked = [asked for asked in self.asked if not asked.ended]
        while len(self.asked) < self._count:
            self.asked.append(world.ask(self._tenant, **self._what))


def crowds(*names: str) -> list[Crowd]:
    return [Crowd(Tenant(name), *HOSTILE[name]) for name in names]


def waits_beside(world: FairWorld, beside: list[Crowd], steps: int = STEPS) -> list[int]:
    """Return the steps that each of a quiet tenant's questions waits for its first token."""
    waits, asked, pause = list[int](), None, 10
    for _ in range(steps):
        for crowd in beside:
            crowd.ask(world)
        if asked is not None and asked.ended:
            waits.append(asked.wait)
            asked, pause = None, 10
        pause -= asked is None
        if asked is None and pause < 0:
            asked = world.ask(QUIET)
        world.run()
    if asked is not None and not asked.steps:
        waits.append(world.step - asked.since)  # at least as long
    return waits


def loaded(world: FairWorld, *tenants: Tenant, **what: Any) -> list[Asked]:
    """Give each tenant more to do than there are seats."""
    what = {"max_tokens": 2000} | what
    return [world.ask(tenant, **what) for tenant in tenants for _ in range(2 * SEATS)]


@pytest.mark.always
@pytest.mark.parametrize(
    "names",
    quick([tuple(HOSTILE), *[(name,) for name in HOSTILE]], 1),
)
def test_a_quiet_tenant_is_answered_as_if_alone(names: tuple[str, ...]) -> None:
    (alone,) = set(waits_beside(FairWorld(SEATS), []))
    world = FairWorld(SEATS, blocks=30_000)
    waits = waits_beside(world, crowds(*names))
    assert len(waits) > 10
    assert median(waits) <= 3 * alone and max(waits) <= 10 * alone
    assert set(world.computed) == {*names, "quiet"}
    hostile = [world.computed[name] for name in names]
    assert max(hostile) < 1.2 * min(hostile)


@pytest.mark.sweep
def test_shares_cost_no_tokens() -> None:
    per_step = []
    for shares in (True, False):
        world = FairWorld(SEATS, blocks=30_000, shares=shares)
        waits = waits_beside(world, crowds(*HOSTILE))
        per_step.append(world.planned / world.step)
    assert per_step[0] >= 0.98 * per_step[1]
    assert max(waits) >= STEPS - 11, "without shares nobody else has a turn: the test is worth it"


@pytest.mark.parametrize("seats", quick([SEATS, 2], 1))
def test_tokens_come_near_to_the_weights(seats: int) -> None:
    world = FairWorld(seats)
    tenants = [Tenant("a", 1), Tenant("b", 3), Tenant("c", 4)]
    loaded(world, *tenants)
    world.run(400 // seats)
    world.computed.clear()
    world.run(1600 // seats)
    total = sum(world.computed.values())
    for tenant in tenants:
        assert world.computed[tenant.name] / total == pytest.approx(tenant.weight / 8, abs=0.05)


def test_prompts_of_many_steps_take_turns() -> None:
    """In the step's budget: both have a seat, and neither's prompt is short."""
    world = FairWorld(SEATS, budget=64)
    one = world.ask(ALICE, length=1200, max_tokens=1)
    world.run(2)
    two = world.ask(MALLORY, length=1200, max_tokens=1)
    world.run(16)
    assert not (one.steps or two.steps)
    assert abs(world.computed["alice"] - world.computed["mallory"]) <= 3 * 64
    world.run(40)
    assert one.ended and two.ended


def test_a_waiting_prompt_comes_before_a_longer_one_of_another() -> None:
    world = FairWorld(SEATS, budget=64)
    world.ask(MALLORY, length=3000, max_tokens=1)
    world.run(3)
    asked = world.ask(ALICE, length=100)  # too long to overtake one of its own tenant
    world.run(4)
    assert asked.wait <= 4


def test_a_tenant_alone_has_everything_and_nothing_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("work for a tenant alone")

    for name in ("_in_turn", "_payers", "_first", "_may_yield"):
        monkeypatch.setattr(Shares, name, fail)
    world = FairWorld(2)
    shares = world.shares
    assert shares is not None
    asked = [world.ask(ALICE, n=2, max_tokens=30) for _ in range(4)]
    world.run(20)
    assert world.seats(ALICE) == 2
    assert [account.used for account in shares._accounts.values()] == [0.0]
    world.run(400)
    assert all(each.ended for each in asked)


@pytest.mark.sweep
def test_who_was_idle_has_no_credit() -> None:
    world = FairWorld(SEATS)
    world.ask(ALICE)
    world.run(12)
    loaded(world, MALLORY, QUIET)
    world.run(300)  # alice could have had a third of it
    world.computed.clear()
    loaded(world, ALICE)
    world.run(150)
    assert world.computed["alice"] <= 1.2 * world.computed["mallory"]


@pytest.mark.sweep
def test_who_lacked_nothing_has_no_credit_either() -> None:
    """One seat was all it asked for, beside tenants that waited."""
    world = FairWorld(SEATS)
    loaded(world, MALLORY, QUIET)
    world.ask(ALICE, max_tokens=2000)
    world.run(300)
    world.computed.clear()
    loaded(world, ALICE)
    world.run(150)
    assert world.computed["alice"] <= 1.2 * world.computed["mallory"]


def test_what_was_used_is_not_forgotten_by_leaving() -> None:
    world = FairWorld(1)
    world.ask(MALLORY, max_tokens=4000)
    world.ask(QUIET, max_tokens=4000)
    world.run(4)
    world.ask(ALICE, length=240, max_tokens=1)
    world.run(40)  # alice has had what the others get in hundreds of steps, and has left
    again = world.ask(ALICE)
    world.run(100)
    assert not again.steps
    world.run(400)
    assert again.ended


def test_nobody_starves_where_tenants_are_more_than_seats() -> None:
    world = FairWorld(2)
    tenants = [Tenant(f"t{each}") for each in range(12)]
    asked = [world.ask(tenant, max_tokens=2000) for tenant in tenants for _ in range(2)]
    world.run(12 * LEAST_TURN)
    assert set(world.computed) == {tenant.name for tenant in tenants}
    longest = max(asked, key=lambda each: sum(map(len, each.tokens.values())))
    assert sum(map(len, longest.tokens.values())) <= 4 * LEAST_TURN


@pytest.mark.sweep
def test_given_up_seats_lose_no_token() -> None:
    world, alone = FairWorld(2), FairWorld(2)
    long = [world.ask(MALLORY, max_tokens=100, n=2) for _ in range(2)]
    for _ in range(8):
        world.ask(ALICE)
        world.run(20)
    world.run(200)
    shares = world.shares
    assert shares is not None and shares.given_up.total() > 5
    assert world.scheduler.num_preemptions == shares.given_up.total()
    expected = [alone.ask(MALLORY, max_tokens=100, n=2) for _ in range(2)]
    alone.run(300)
    assert [each.tokens for each in long] == [each.tokens for each in expected]
    # The last choice of the second request had no seat to fork into: its prompt is matched again.
    assert world.computed["mallory"] - alone.computed["mallory"] <= 8


def test_a_sequence_gives_up_its_seat_once_in_a_turn() -> None:
    world = FairWorld(1)
    world.ask(MALLORY, max_tokens=4000)
    world.run(40)
    given: list[int] = []
    for _ in range(300):
        if not world.open_of(ALICE):
            world.ask(ALICE, length=8, max_tokens=1)
        before = world.scheduler.num_preemptions
        world.run()
        if world.scheduler.num_preemptions > before:
            given.append(world.computed["mallory"])
    assert len(given) > 3
    assert all(
        later - sooner >= LEAST_TURN for sooner, later in zip(given, given[1:], strict=False)
    )


def test_priority_orders_within_a_tenant_only() -> None:
    world = FairWorld(1)
    world.ask(QUIET, max_tokens=30)
    world.run(2)
    late = world.ask(MALLORY, max_tokens=4, priority=0)
    soon = world.ask(MALLORY, max_tokens=4, priority=-5)
    urgent = [world.ask(ALICE, max_tokens=4, priority=-9) for _ in range(6)]
    world.run(200)
    assert soon.steps[0][0] < late.steps[0][0]
    assert soon.steps[0][0] < urgent[-1].steps[0][0]


def test_work_in_the_background_gives_up_its_seats() -> None:
    world = FairWorld(2)
    world.ask(MALLORY, max_tokens=400, n=2, priority=BACKGROUND)
    world.run(20)
    asked = [world.ask(MALLORY, max_tokens=40) for _ in range(2)]
    world.run(3)
    assert all(each.steps for each in asked)
    behind = world.ask(ALICE, priority=BACKGROUND)
    world.run(30)
    assert not behind.steps
    world.run(60)
    assert behind.ended


def test_followers_pay_their_part_of_a_leader() -> None:
    world = FairWorld(4, budget=64)
    shared = tuple(range(2, 42)) * 20
    world.ask(MALLORY, beginning=shared, length=9)
    world.run(2)
    for _ in range(3):
        world.ask(ALICE, beginning=shared, length=9)
    world.ask(QUIET, max_tokens=400)
    world.run(6)
    shares = world.shares
    assert shares is not None
    used = {name: account.used for (name, _), account in shares._accounts.items()}
    assert used["alice"] > 2 * (used["mallory"] - 64 * 2)


def test_a_leader_has_the_turn_of_its_followers() -> None:
    world = FairWorld(4, budget=64)
    shared = tuple(range(2, 42)) * 10
    loaded(world, MALLORY, QUIET, length=300)
    world.run(4)
    leader = world.ask(MALLORY, beginning=shared, length=9)
    world.run(1)
    asked = world.ask(ALICE, beginning=shared, length=9)
    world.run(40)
    assert asked.steps
    assert leader.since <= asked.since


@pytest.mark.parametrize("blocks", quick([200, 130, 80], 1))
def test_little_memory_keeps_nobody_waiting_for_ever(blocks: int) -> None:
    """Two that do not fit beside each other must not take each other's blocks again and again."""
    steps = []
    for shares in (True, False):
        world = FairWorld(4, blocks=blocks, shares=shares)
        for tenant in (ALICE, MALLORY, QUIET) * 3:
            world.ask(tenant, length=500, max_tokens=60)
        while world.open and world.step < 1500:
            world.run()
        steps.append(world.step)
    assert steps[0] <= 1.1 * steps[1]


def test_a_seat_that_cannot_be_taken_ends_nobody() -> None:
    """The one whose turn it is finds no space; the one that gave up its seat goes on."""
    world = FairWorld(1, blocks=80)
    world.ask(MALLORY, length=100, max_tokens=300)
    world.run(30)
    asked = world.ask(ALICE, length=300, max_tokens=8)
    world.run(800)
    assert asked.ended and not world.open


def test_counts_are_by_label() -> None:
    world = FairWorld(1)
    named = Tenant("address 10.0.0.1", 1, "addresses")
    world.ask(named, max_tokens=200)
    world.run(40)
    world.ask(Tenant("key", 2, "tenant 1"))
    world.run(300)
    shares = world.shares
    assert shares is not None
    for group in world.finished:
        shares.on_finished(group)
    counts = shares.as_dict()
    assert counts["addresses"]["given_up_seats"] == 1
    assert counts["tenant 1"]["generated_tokens"] == 8 and counts["tenant 1"]["requests"] == 1


def test_a_closed_account_leaves_nothing() -> None:
    world = FairWorld(2)
    for each in range(20):
        world.ask(Tenant(f"t{each}"))
    world.run(400)
    shares = world.shares
    assert shares is not None and not world.open
    assert not (shares._accounts or shares._of or shares._debts or shares._marks)


def test_the_seats_of_equal_tenants_are_equal() -> None:
    world = FairWorld(SEATS)
    loaded(world, ALICE)
    world.run(10)
    assert world.seats(ALICE) == SEATS
    loaded(world, MALLORY)
    world.run(2)
    assert (world.seats(ALICE), world.seats(MALLORY)) == (4, 4)
    heavy = Tenant("heavy", 6)
    loaded(world, heavy)
    world.run(2)
    assert world.seats(heavy) == 6
