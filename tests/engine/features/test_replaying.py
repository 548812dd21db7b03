"""Forced tokens are taken whatever is drawn, several in a slice, from what a step has left."""

from __future__ import annotations

import pytest
from scheduling import BLOCK, World
from symbolic import VOCABULARY, chain, extended, next_token

from vlm_serve.engine.core.queues import MAX_REPLAYS, REPLAYED_TOKENS, UpdateSlots
from vlm_serve.engine.requests.plan import StepPlan
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.errors import InvalidRequestError


def answer(group: SequenceGroup, length: int, index: int = 0) -> tuple[int, ...]:
    """What a choice says by itself."""
    sequence, tokens = group.sequences[index], list[int]()
    digest = chain(sequence.info.positions, sequence.prompt.token_ids)[-1]
    for _ in range(length):
        tokens.append(next_token(digest, sequence.info.seed))
        digest = extended(digest, tokens[-1])
    return tuple(tokens)


def own_answer(length: int = 10, max_tokens: int = 40) -> tuple[int, ...]:
    return answer(World(30).submit(5, length, max_tokens), max_tokens)


def kinds(plan: StepPlan) -> list[tuple[str, int]]:
    return [(item.kind, item.end - item.start) for item in plan.slices]


def test_forced_tokens_come_in_slices_that_verify() -> None:
    one, expected = World(30), own_answer()
    group = one.submit(5, 10, 40, forced=(expected[:25],))
    plan = one.plan()
    assert kinds(plan) == [("prefill", 10)] and plan.slices[0].samples[0].forced == expected[0]
    assert len(one.run(plan)) == 1
    plan = one.plan()
    assert kinds(plan) == [("verify", REPLAYED_TOKENS)]
    assert [task.forced for task in plan.slices[0].samples] == list(expected[1:17])
    assert len(one.run(plan)) == REPLAYED_TOKENS
    plan = one.plan()
    assert [task.forced for task in plan.slices[0].samples] == [*expected[17:25], None]
    one.run(plan)
    while one.scheduler.has_work:
        one.run(one.plan())
        one.cache.check()
    assert group.sequences[0].generated == expected
    assert one.replays.counts.as_dict() == {
        "requests": 1,
        "tokens": 25,
        "disagreements": 0,
    }
    assert group.usage.accepted_prediction_tokens == group.usage.rejected_prediction_tokens == 0


def test_a_forced_token_comes_whatever_is_drawn() -> None:
    one, expected = World(30), own_answer()
    forced = (*expected[:4], expected[4] ^ 1, *expected[5:9])
    group = one.submit(5, 10, 12, forced=(forced,))
    while one.scheduler.has_work:
        one.run(one.plan())
    assert group.sequences[0].generated[:9] == forced and len(group.sequences[0].generated) == 12
    counts = one.replays.counts
    assert counts.tokens == 9 and 1 <= counts.disagreements <= 5


def test_every_choice_has_its_own() -> None:
    one = World(60)
    group = World(30).submit(5, 10, 30, n=2)
    expected = [answer(group, 30, index) for index in range(2)]
    group = one.submit(5, 10, 30, n=2, forced=(expected[0][:20], expected[1][:3]))
    while one.scheduler.has_work:
        one.run(one.plan())
        one.cache.check()
    assert [sequence.generated for sequence in group.sequences] == expected
    assert one.replays.counts.tokens == 23


def test_replays_take_what_decodes_leave() -> None:
    """And come with the prefills, in their order."""
    one, expected = World(60, changes={"max_num_batched_tokens": 12}), own_answer(10)
    one.submit(6, 10, 40)
    one.run(one.plan())
    one.submit(5, 10, 40, forced=(expected[:30],))
    one.run(one.plan())
    one.run(one.plan())
    assert sorted(kinds(one.plan())) == [("decode", 1), ("verify", 11)]


def test_few_requests_replay_at_a_time() -> None:
    one = World(200, changes={"max_num_seqs": 10, "max_num_batched_tokens": 200})
    for token in range(5, 5 + MAX_REPLAYS + 2):
        one.submit(token, 10, 40, forced=((1, 2, 3),))
    fresh = one.submit(20, 10, 40)
    plan = one.scheduler.plan()
    assert plan is not None
    running = {sequence.group for sequence in one.scheduler.running}
    assert len(running) == MAX_REPLAYS + 1 and fresh in running
    assert len(one.scheduler.waiting) == 2


def test_a_decode_preempts_what_replays_whenever_it_came() -> None:
    one, expected = World(8), own_answer(BLOCK, 40)
    replay = one.submit(5, BLOCK, 40, forced=(expected[:30],))
    one.run(one.plan())
    decode = one.submit(6, 3 * BLOCK, 20)
    while not decode.finished:
        one.run(one.plan())
        one.cache.check()
    assert one.scheduler.num_preemptions > 0
    while one.scheduler.has_work:
        one.run(one.plan())
    assert replay.sequences[0].generated == expected
    assert len(decode.sequences[0].generated) == 20


def test_replays_stop_before_a_state_that_is_to_be_kept() -> None:
    one = World(30, changes={"decode_state_interval": BLOCK})
    expected = own_answer()
    group = one.submit(5, 10, 40, forced=(expected[:30],))
    one.run(one.plan())
    plan = one.plan()
    assert kinds(plan) == [("verify", 5)]
    one.run(plan)
    plan = one.plan()
    assert kinds(plan) == [("decode", 1)] and plan.slices[0].end == 16 and plan.folds
    while one.scheduler.has_work:
        one.run(one.plan())
        one.cache.check()
    assert group.sequences[0].generated == expected


def test_a_token_that_must_not_come_ends_the_request() -> None:
    """It is none of this request's answer."""
    one, expected = World(30), own_answer()
    for place in (0, 1, 5):
        banned = expected[place]
        allowed = tuple(token for token in range(VOCABULARY) if token != banned)
        one.submit(5, 10, 40, forced=(expected[:10],), allowed_token_ids=allowed)
        errors: list[Exception] = []
        while one.scheduler.has_work:
            plan = one.scheduler.plan()
            failures = one.scheduler.take_failures()
            errors += [delta.error for _, delta in failures if delta.error is not None]
            if plan is not None and not failures:
                one.run(plan)
        (error,) = errors
        assert isinstance(error, InvalidRequestError) and "is forbidden by" in str(error)
        one.cache.check()


@pytest.mark.parametrize(("sequences", "drafts"), [(1, 0), (2, 0), (8, 0), (8, 7)])
def test_seats(sequences: int, drafts: int) -> None:
    slots = UpdateSlots.of(sequences, drafts)
    if drafts:
        assert (slots.count, slots.size) == (sequences, drafts + 1)
    else:
        assert (slots.count, slots.size) == (min(sequences, MAX_REPLAYS), REPLAYED_TOKENS)
