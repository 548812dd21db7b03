"""The programme of places, compared with every possible choice."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_serve.cache.placement import (
    MAX_BINS,
    Bin,
    choose_places,
    merged,
    remaining,
    solve,
)

bins = st.lists(
    st.builds(
        Bin,
        at=st.integers(-12, 12),
        lost=st.sampled_from([0.0, 1.0, 3.0, 10.0, 100.0]),
        weight=st.sampled_from([0.1, 1.0, 2.5]),
        possible=st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=7,
    unique_by=lambda each: each.at,
)


def saved(found: list[Bin], places: list[int] | tuple[int, ...]) -> float:
    left = remaining(found, places)
    return sum(each.weight * (each.lost - lost) for each, lost in zip(found, left, strict=True))


@given(found=bins, most=st.integers(0, 4), price=st.sampled_from([0.0, 2.0, 40.0]))
def test_no_choice_saves_more(found: list[Bin], most: int, price: float) -> None:
    possible = [each.at for each in found if each.possible]
    best = [
        max(saved(found, places) for places in combinations(possible, count))
        for count in range(min(most, len(possible)) + 1)
    ]
    places = choose_places(found, most, price)
    assert places == sorted(places) and set(places) <= set(possible)
    assert saved(found, places) == pytest.approx(best[len(places)])
    for count in range(1, len(places) + 1):
        assert best[count] - best[count - 1] > price
    if len(places) + 1 < len(best):
        assert best[len(places) + 1] - best[len(places)] <= price


def test_one_place_serves_what_parts_a_little_later() -> None:
    near = [Bin(10, 10.0, 5.0), Bin(11, 11.0, 5.0), Bin(40, 40.0, 1.0)]
    assert choose_places(near, 1) == [10]
    assert choose_places(near, 2) == [10, 40]
    assert choose_places(near, 3) == [10, 11, 40]
    assert choose_places(near, 3, price=6.0) == [10, 40]
    assert remaining(near, [10, 40]) == [0.0, 1.0, 0.0]


def test_a_place_that_only_one_prompt_suggests_is_left_out() -> None:
    once = [Bin(10, 10.0, 1.0), Bin(90, 90.0, 1.0)]
    assert solve(once, 7, 0.0).ranked == []
    again = [*once, Bin(12, 12.0, 1.0)]
    found = solve(again, 7, 0.0)
    assert found.ranked == [10] and found.left == [0.0, 80.0, 2.0] and found.gain == 30.0


def test_bins_are_few_and_the_important_ones_stay() -> None:
    many = [Bin(at, 1.0 + at, 1.0) for at in range(500)] * 2
    kept = merged(many)
    assert len(kept) == MAX_BINS and min(each.at for each in kept) == 500 - MAX_BINS
    assert all(each.weight == 2.0 and each.possible for each in kept)
