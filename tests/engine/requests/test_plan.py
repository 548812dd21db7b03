"""Plans are data that does not grow, and what comes back may be several tokens."""

from __future__ import annotations

import pickle

from scheduling import World
from symbolic import END_OF_TURN

from vlm_serve.engine.requests.plan import SampledToken, StepOutput


def test_a_decode_step_is_as_small_after_a_long_answer_as_at_its_start() -> None:
    world = World(num_blocks=300)
    world.submit(5, length=300, max_tokens=2000)
    sizes = []
    while world.scheduler.has_work:
        plan = world.plan()
        sizes.append(len(pickle.dumps(plan)))
        world.run(plan)
    assert len(sizes) > 2000
    # One token and at most two blocks; integers take a byte more or less.
    assert max(sizes[-1000:]) - min(sizes[4:100]) <= 16
    assert max(sizes[4:]) < 1000


def test_a_choice_ends_at_the_first_of_several_tokens_that_ends_it() -> None:
    world = World(num_blocks=10)
    group = world.submit(5, length=20, max_tokens=30, ignore_eos=False)
    plan = world.plan()
    tokens = tuple(SampledToken(token, {}) for token in (7, END_OF_TURN, 9))
    events = world.scheduler.commit(plan, StepOutput({plan.slices[0].sequence: tokens}))
    assert [delta.token_ids for _, delta in events] == [(7,), (END_OF_TURN,)]
    assert group.finished and group.sequences[0].generated == (7, END_OF_TURN)
    assert not world.scheduler.has_work
    world.cache.check()
