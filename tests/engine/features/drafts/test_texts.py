"""Where a text goes on, and what a sequence is told of others."""

from __future__ import annotations

import itertools
import random
from array import array

from letters import Letters
from symbolic import make_prompt

from vlm_serve.engine.features.drafts.suffix import (
    BYTES_PER_TOKEN,
    CONTEXT_BYTES,
    MAX_TRIED,
    ORDER,
    Answers,
    IndexedText,
    SuffixDrafter,
    nearest,
    repeated,
)
from vlm_serve.engine.requests.request import Language, Request
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup
from vlm_serve.sampling_params import SamplingParams

NUMBERS = itertools.count()


def sequence(
    prompt: tuple[int, ...],
    *answer: int,
    salt: str = "",
    prediction: tuple[int, ...] = (),
    cold: bool = False,
) -> Sequence:
    request = Request(
        "r",
        make_prompt([prompt], block_size=4, salt=salt),
        SamplingParams(temperature=0.0),
        print,
        prediction=prediction,
        cold=cold,
    )
    (made,) = SequenceGroup(request, NUMBERS, Language(Letters(), frozenset(), 50, 500)).sequences
    made.token_ids += answer
    return made


def test_a_text_goes_on_behind_its_last_occurrence() -> None:
    text = IndexedText([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3])
    assert text.find([9, 1, 2, 3]) == (text.tokens, 7, 3)
    assert text.find([2, 3, 4]) == (text.tokens, 4, 3)
    assert text.find([4, 5, 6]) is None and text.find([1, 2]) is None


def test_what_was_removed_is_not_found_and_the_rest_is() -> None:
    """Against looking through all texts for most of the same tokens."""
    rng, answers, texts = random.Random(0), Answers(), dict[int, list[int]]()
    for number in range(60):
        texts[number] = rng.choices(range(4), k=rng.randint(4, 30))
        answers.add(number, array("i", texts[number]))
        if number > 20:
            answers.remove(number - 20)
            del texts[number - 20]
        ending = rng.choices(range(4), k=5)
        matches = [
            max(length for length in (3, 4, 5) if text[end - length : end] == ending[-length:])
            for text in texts.values()
            for end in range(3, len(text))
            if text[end - 3 : end] == ending[-3:]
        ]
        found = answers.find(ending)
        if found is None:
            assert not matches
            continue
        text, at, length = found
        assert list(text) in texts.values() and list(text[at - length : at]) == ending[-length:]
        if len(matches) <= MAX_TRIED:
            assert length == max(matches)


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    assert repeated([7, 8, 9], 1, 5) == (8, 9, 8, 9, 8)
    assert repeated([7, 8, 9], 2, 3) == (9, 9, 9)
    assert repeated([7, 8, 9], 0, 2) == (7, 8)


def test_a_sequence_repeats_itself() -> None:
    drafter = SuffixDrafter()
    one = sequence((1, 2, 3, 4, 5, 6), 9, 2, 3)
    assert drafter.propose(one, 4) == ()
    one.token_ids.append(4)
    assert drafter.propose(one, 2) == (5, 6)
    one.token_ids += [5, 6, 9]
    assert drafter.propose(one, 3) == (2, 3, 4)
    one.token_ids.append(8)
    assert drafter.propose(one, 3) == (3, 4, 5)  # As if 8 stood for the 2.
    one.token_ids.append(4)
    assert drafter.propose(one, 2) == (5, 6)  # The 3 was left out.
    one.token_ids += [15, 16]
    assert drafter.propose(one, 3) != ()
    one.token_ids.append(17)
    assert drafter.propose(one, 3) == ()


def test_earlier_answers_of_the_same_tenant_come_again() -> None:
    drafter = SuffixDrafter()
    drafter.forget(sequence((1, 2), 10, 11, 12, 13, 14))
    drafter.forget(sequence((1, 2), 20, 21, 22, 23, salt="tenant"))
    drafter.forget(sequence((1, 2), 30, 31, 32, 33, cold=True))
    assert drafter.propose(sequence((5,), 10, 11, 12), 5) == (13, 14)
    assert drafter.propose(sequence((5,), 20, 21, 22), 5) == ()
    assert drafter.propose(sequence((5,), 20, 21, 22, salt="tenant"), 5) == (23,)
    assert drafter.propose(sequence((5,), 30, 31, 32), 5) == ()


def test_a_prediction_begins_with_the_answer_and_is_found_again() -> None:
    drafter = SuffixDrafter()
    one = sequence((1, 2), prediction=(10, 11, 12, 13, 14, 15))
    assert drafter.propose(one, 2) == (10, 11) and drafter.evidence(one) == 7
    one.token_ids += [10, 11]
    assert drafter.propose(one, 2) == (12, 13)
    one.token_ids += [40, 11, 12]
    assert drafter.propose(one, 2) == (13, 14)
    one.token_ids += [13]
    assert drafter.propose(one, 2) == (14, 15)


def test_much_speaks_for_what_has_long_been_the_same() -> None:
    drafter, text = SuffixDrafter(), tuple(range(1, 20))
    one = sequence((*text, 30), 1, 2, 3)
    for token, evidence in zip((4, 5, 6, 7, 8, 9), (3, 4, 5, 6, 7, 7), strict=True):
        assert drafter.propose(one, 1) == (token,) and drafter.evidence(one) == evidence
        one.token_ids.append(token)
    one.token_ids.append(40)
    assert drafter.propose(one, 1) == (11,) and drafter.evidence(one) == 0


def test_an_answer_begins_as_earlier_ones_to_the_same_question() -> None:
    """Which says little: no token of this answer has been compared yet but the first."""
    drafter, ending = SuffixDrafter(), (40, 41, 42)
    drafter.forget(sequence((1, *ending), 10, 11, 12))
    drafter.forget(sequence((2, *ending), 20, 21, 22))
    for question, first in ((1, 10), (2, 20)):
        one = sequence((question, *ending), first)
        assert drafter.propose(one, 5) == (first + 1, first + 2)
        assert drafter.evidence(one) == 1
    assert drafter.propose(sequence((3, 43, 44), 10), 5) == ()


def test_a_text_is_not_left_for_a_few_equal_tokens() -> None:
    """Only for more of them, or when two of its own were others."""
    drafter, page = SuffixDrafter(), tuple(range(100, 120))
    one = sequence((103, 104, 105, 50, 7, *page, 60), *page[:6])
    assert drafter.propose(one, 1) == (106,)
    one.token_ids.append(50)
    assert drafter.propose(one, 1) == (7,)  # Four tokens are equal there.
    drafter = SuffixDrafter()
    one = sequence((105, 50, 7, *page, 60), *page[1:6])
    drafter.propose(one, 1)
    one.token_ids.append(50)
    assert drafter.propose(one, 1) == (107,)
    one.token_ids.append(7)
    assert drafter.propose(one, 1) == (100,)


def test_where_a_text_goes_on_behind_another_token() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    assert nearest(text, 2, 9, lost=False) == 3  # It stands for the 3.
    assert nearest(text, 2, 4, lost=False) == 4  # The 3 was left out.
    assert nearest(text, 2, 5, lost=False) == 3  # Two would be many.
    assert nearest(text, 7, 9, lost=False) == 8
    often = [1, 2, 3, 4, 5, 4, 7, 8]
    assert nearest(often, 2, 4, lost=False) == 3
    assert nearest(often, 2, 4, lost=True) == 4
    assert nearest(text, 3, 3, lost=True) == 3  # One was put in before the 3.
    assert nearest(text, 3, 9, lost=True) == 4


def test_a_copy_goes_on_where_a_word_is_another_one_or_is_missing_or_put_in() -> None:
    page = tuple(range(100, 120))
    for change, resumed in (
        ((50,), [(106, 107)]),
        ((106,), [(107, 108)]),
        ((50, 105), [(106, 107), (106, 107)]),
    ):
        drafter, one = SuffixDrafter(), sequence((*page, 60), *page[:5])
        assert drafter.propose(one, 2) == (105, 106)
        for token, next_ones in zip(change, resumed, strict=True):
            one.token_ids.append(token)
            assert drafter.propose(one, 2) == next_ones


def test_a_copy_begins_where_the_prompt_has_its_first_tokens_first() -> None:
    """Which says little, and is left at once when a token is another one."""
    drafter = SuffixDrafter()
    one = sequence((7, 8, 20, 21, 22, 23, 20, 30, 60, 20, 40, 9), 20)
    assert drafter.propose(one, 3) == (21, 22, 23) and drafter.evidence(one) == 1
    one.token_ids.append(30)
    assert drafter.propose(one, 3) == (60, 20, 40) and drafter.evidence(one) == 2
    assert drafter.propose(sequence((7, 8, 9), 50), 3) == ()
    assert drafter.propose(sequence((7, 8, 9, 10), 8, 10), 3) == ()


def test_the_longest_match_is_followed() -> None:
    drafter = SuffixDrafter()
    drafter.forget(sequence((1,), 5, 6, 7, 8, 20, 21))
    assert drafter.propose(sequence((9, 6, 7, 8, 30), 5, 6, 7, 8), 2) == (20, 21)
    assert drafter.propose(sequence((5, 6, 7, 8, 30, 31), 9, 6, 7, 8), 1) == (30,)


def test_answers_are_bounded_in_bytes() -> None:
    drafter = SuffixDrafter(20 * BYTES_PER_TOKEN)
    for start in range(0, 1000, 10):
        drafter.forget(sequence((1,), *range(start, start + 6)))
        assert drafter.num_bytes <= 20 * BYTES_PER_TOKEN
    assert drafter.propose(sequence((1,), 990, 991, 992), 2) == (993, 994)
    assert drafter.propose(sequence((1,), 0, 1, 2), 2) == ()
    drafter.forget(sequence((1,), *range(100)))
    assert drafter.num_bytes == 18 * BYTES_PER_TOKEN + 3 * CONTEXT_BYTES


def test_a_guess_is_what_has_followed_the_last_tokens() -> None:
    """Asked at every token: as many of them as the evidence says."""
    rng, long = random.Random(2), 0
    for _ in range(20):
        text = rng.choices(range(5), k=60)
        one, drafter = sequence(tuple(text[:10])), SuffixDrafter()
        for token in text[10:]:
            one.token_ids.append(token)
            guess, so_far = drafter.propose(one, 6), one.token_ids
            same = drafter.evidence(one)
            if not guess or same < ORDER:
                continue
            ending = so_far[-same:]
            places = [i for i in range(same, len(so_far)) if so_far[i - same : i] == ending]
            assert guess[0] in {so_far[i] for i in places}
            long += len(guess) == 6
    assert long > 50
