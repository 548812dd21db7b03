"""The choice of places, compared with every possible one."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_serve.cache.placement import Solution, choose_places

Want = tuple[float, float, float]
"""A place, the blocks lost without a snapshot, and a weight."""

wants = st.lists(
    st.tuples(
        st.integers(-12, 12).map(float),
        st.sampled_from([0.0, 1.0, 3.0, 10.0, 100.0]),
        st.sampled_from([0.1, 1.0, 2.5]),
    ),
    min_size=1,
    max_size=7,
)


def choose(found: list[Want], most: int, price: float = 0.0) -> Solution:
    at, lost, weight = np.array(found).T
    return choose_places(at, lost, weight, most, price)


def saved(found: list[Want], places: tuple[int, ...]) -> float:
    """Return what places save, want by want."""
    total = 0.0
    for at, lost, weight in found:
        behind = [at - place for place in places if place <= at]
        total += weight * (lost - min([lost, *behind]))
    return total


@given(found=wants, most=st.integers(0, 4), price=st.sampled_from([0.0, 2.0, 40.0]))
def test_each_place_saves_the_most_beside_those_before_it(
    found: list[Want], most: int, price: float
) -> None:
    solution = choose(found, most, price)
    possible = {
        int(at)
        for at, _, _ in found
        if sum(weight for other, _, weight in found if at <= other <= at + 4) >= 1.8 - 1e-9
    }
    before = 0.0
    for count in range(1, len(solution.ranked) + 1):
        chosen = tuple(solution.ranked[:count])
        gains = [saved(found, (*chosen[:-1], place)) for place in possible]
        assert saved(found, chosen) == pytest.approx(max(gains))
        assert saved(found, chosen) - before > price - 1e-6
        before = saved(found, chosen)
    assert solution.gain == pytest.approx(before)
    best = max(saved(found, places) for places in combinations(possible, min(most, len(possible))))
    if price == 0.0:
        assert solution.gain >= (1 - 1 / np.e) * best - 1e-6


def test_one_place_serves_what_parts_a_little_later() -> None:
    near = [(10.0, 10.0, 5.0), (11.0, 11.0, 5.0), (40.0, 40.0, 2.0)]
    assert choose(near, 1).ranked == [10]
    assert choose(near, 2).ranked == [10, 40]
    assert choose(near, 3).ranked == [10, 40, 11]
    assert choose(near, 3, price=6.0).ranked == [10, 40]
    assert choose(near, 2).left.tolist() == [0.0, 1.0, 0.0]


def test_a_place_that_only_one_prompt_suggests_is_left_out() -> None:
    once = [(10.0, 10.0, 1.0), (90.0, 90.0, 1.0)]
    assert choose(once, 7).ranked == []
    found = choose([*once, (12.0, 12.0, 1.0)], 7)
    assert found.ranked == [10] and found.left.tolist() == [0.0, 80.0, 2.0] and found.gain == 30
