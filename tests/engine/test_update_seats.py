"""Which updates are whose, against a map of what lies where."""

from __future__ import annotations

import itertools
import random

import pytest
from letters import Letters
from symbolic import make_prompt

from vlm_serve.engine.request import Language, Request
from vlm_serve.engine.sequence import Job, Sequence
from vlm_serve.engine.update_seats import SeatPlan, UpdateSeats
from vlm_serve.sampling_params import SamplingParams

SIZE = 4
NUMBERS = itertools.count()


def sequences(count: int) -> list[Sequence]:
    request = Request(
        "r",
        make_prompt([(1,)], block_size=4),
        SamplingParams(temperature=0.0, n=count),
        print,
    )
    return Job(request, NUMBERS, Language(Letters(), frozenset(), 50, 500)).sequences


def test_sequences_have_two_places_while_there_are_enough() -> None:
    plan, (one, two, three, four) = SeatPlan(UpdateSeats(4, SIZE)), sequences(4)
    assert plan.take(one, 2 * SIZE) == 0 and plan.take(two, 1) == 2 * SIZE
    assert plan.room(two) == 2 * SIZE and plan.room(three) == SIZE
    assert plan.take(three, SIZE) == 3 * SIZE
    assert plan.room(two) == plan.room(three) == SIZE and plan.room(four) == 0
    one.pending = SIZE + 1
    assert plan.take(one, 1) == 0 and plan.room(four) == 0  # What is pending lies there.
    one.pending = SIZE
    assert plan.take(one, 1) == 0 and plan.room(four) == SIZE
    assert plan.take(four, 1) == SIZE and plan.first(four) == SIZE and plan.room(one) == SIZE
    plan.leave(three)
    plan.leave(three)
    assert plan.room(two) == 2 * SIZE


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_no_two_sequences_share_a_place(count: int) -> None:
    rng, everyone = random.Random(count), sequences(count)
    plan, held = SeatPlan(UpdateSeats(count, SIZE)), dict[Sequence, range]()
    wide = without = 0
    for _ in range(3000):
        one = rng.choice(everyone)
        if rng.random() < 0.2:
            plan.leave(one)
            one.pending = 0
            held.pop(one, None)
            continue
        room = plan.room(one)
        if not room:
            assert one not in held
            without += 1
            continue
        tokens = rng.randint(1, room)
        first = plan.take(one, tokens)
        assert one not in held or first == held[one].start == plan.first(one)
        kept = max(tokens, one.pending)
        one.pending = rng.randint(1, tokens)
        held[one] = range(first, first + kept)
        assert held[one].stop <= count * SIZE
        assert len({each for own in held.values() for each in own}) == sum(map(len, held.values()))
        wide += tokens > SIZE
    assert bool(wide) == (count > 1) and (without or count < 3)
