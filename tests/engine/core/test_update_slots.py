"""Which updates are whose, against a map of what lies where."""

from __future__ import annotations

import itertools
import random

import pytest
from letters import Letters
from symbolic import make_prompt

from vlm_serve.engine.core.queues import UpdateSlotAllocator, UpdateSlots
from vlm_serve.engine.requests.request import Language, Request
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup
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
    return SequenceGroup(request, NUMBERS, Language(Letters(), frozenset(), 50, 500)).sequences


def test_sequences_have_two_places_while_there_are_enough() -> None:
    allocator, (one, two, three, four) = UpdateSlotAllocator(UpdateSlots(4, SIZE)), sequences(4)
    assert allocator.take(one, 2 * SIZE) == 0 and allocator.take(two, 1) == 2 * SIZE
    assert allocator.capacity(two) == 2 * SIZE and allocator.capacity(three) == SIZE
    assert allocator.take(three, SIZE) == 3 * SIZE
    assert (
        allocator.capacity(two) == allocator.capacity(three) == SIZE
        and allocator.capacity(four) == 0
    )
    one.pending = SIZE + 1
    assert (
        allocator.take(one, 1) == 0 and allocator.capacity(four) == 0
    )  # What is pending lies there.
    one.pending = SIZE
    assert allocator.take(one, 1) == 0 and allocator.capacity(four) == SIZE
    assert (
        allocator.take(four, 1) == SIZE
        and allocator.first_update(four) == SIZE
        and allocator.capacity(one) == SIZE
    )
    allocator.release(three)
    allocator.release(three)
    assert allocator.capacity(two) == 2 * SIZE


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_no_two_sequences_share_a_place(count: int) -> None:
    rng, everyone = random.Random(count), sequences(count)
    allocator, held = UpdateSlotAllocator(UpdateSlots(count, SIZE)), dict[Sequence, range]()
    wide = without = 0
    for _ in range(3000):
        one = rng.choice(everyone)
        if rng.random() < 0.2:
            allocator.release(one)
            one.pending = 0
            held.pop(one, None)
            continue
        room = allocator.capacity(one)
        if not room:
            assert one not in held
            without += 1
            continue
        tokens = rng.randint(1, room)
        first = allocator.take(one, tokens)
        assert one not in held or first == held[one].start == allocator.first_update(one)
        kept = max(tokens, one.pending)
        one.pending = rng.randint(1, tokens)
        held[one] = range(first, first + kept)
        assert held[one].stop <= count * SIZE
        assert len({each for own in held.values() for each in own}) == sum(map(len, held.values()))
        wide += tokens > SIZE
    assert bool(wide) == (count > 1) and (without or count < 3)
