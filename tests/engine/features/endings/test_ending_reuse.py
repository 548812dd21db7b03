"""How often ends of answers are continued, by group."""

from __future__ import annotations

from symbolic import END_OF_TURN, make_prompt

from vlm_serve.cache.matching import key_at
from vlm_serve.engine.features.endings.endings import EndReuse
from vlm_serve.preprocess.identity.keys import PromptKeys

BLOCK = 8


def keys(number: int, turns: int) -> PromptKeys:
    """A conversation of that many turns."""
    turn = (number % 40 + 5, number // 40 % 40 + 5, number // 1600 + 5, END_OF_TURN)
    return make_prompt([turn * turns], block_size=BLOCK).keys


def end(number: int, turns: int = 1) -> bytes:
    found = keys(number, turns)
    return key_at(found, found.cuts[-1])


def test_a_group_that_goes_on_keeps_its_rate() -> None:
    reuse, group = EndReuse(), (b"root", "agent")
    for number in range(3000):
        reuse.ended(group, end(number))
        reuse.asked(keys(number, 2))
    assert reuse.rate(group) == 1.0


def test_ends_that_nobody_continues_count_once_they_leave_the_memory() -> None:
    reuse, once, chats = EndReuse(), (b"root", "chat"), (b"other", "chat")
    for number in range(1000):
        reuse.ended(once, end(number))
    assert reuse.rate(once) == 1.0, "they may still be continued"
    for number in range(1000, 2500):
        reuse.ended(once, end(number))
    assert reuse.rate(once) < 0.02
    assert reuse.rate(chats) == 1.0


def test_a_group_comes_back() -> None:
    reuse, group = EndReuse(), (b"root", "chat")
    for number in range(3000):
        reuse.ended(group, end(number))
    rate = reuse.rate(group)
    for number in range(2900, 3000):
        reuse.asked(keys(number, 2))
    assert rate < 0.01 < 0.8 < reuse.rate(group)


def test_only_the_deepest_end_of_a_prompt_counts_and_only_once() -> None:
    reuse, group = EndReuse(), (b"root", "chat")
    for turns in (1, 2):
        reuse.ended(group, end(7, turns))
    reuse.asked(keys(7, 3))
    reuse.asked(keys(7, 3))  # the shallower one
    reuse.asked(keys(7, 3))
    reuse.forget(end(8))
    for number in range(1000, 2200):
        reuse.ended((b"other", "chat"), end(number))
    assert reuse.rate(group) == 1.0
