"""Chooses places of prompts for snapshots: a dynamic programme over partings of prompts.

The problem is that of arXiv 2605.05219: prompts part at known depths with known weights, a request
starts again from the deepest snapshot before that point, and each snapshot has a price.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

MAX_BINS = 32
"""Maximum number of bins of one run; time grows with their square."""
_NEAR, _SUPPORT = 4, 1.8
"""A place needs so many wants, decayed, within so many blocks: a single one does not come again."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Prompts with one place of parting.

    Attributes:
        at: the place, in blocks along some axis.
        lost: blocks to compute again by such a prompt without a place.
        weight: number of these prompts; decayed, so no integer.
        possible: it may be chosen. It is served in any case.
    """

    at: int
    lost: float
    weight: float
    possible: bool = True


@dataclass(frozen=True, slots=True)
class Solution:
    """Places along one axis.

    Attributes:
        ranked: by savings, the most first.
        left: blocks lost by each bin.
        gain: blocks saved, times weight.
    """

    ranked: list[int]
    left: list[float]
    gain: float


def choose_places(bins: Sequence[Bin], most: int, price: float = 0.0) -> list[int]:
    """Return the places with the most blocks saved, ascending.

    A bin is served by the deepest chosen place not behind it, and then loses at most
    the blocks in between. Only places of bins are considered: moving a place deeper up to the next
    bin never loses anything.

    Args:
        bins: in any order, at most one for each place.
        most: maximum number of places.
        price: savings due from each further place, in blocks times weight.
    """
    ordered = sorted(bins, key=lambda each: each.at)
    count = len(ordered)
    served = [_served(ordered[first:]) for first in range(count)]
    possible = [index for index in range(count) if ordered[index].possible]
    ends = [*possible, count]
    best, total, start = [0.0] * (count + 1), 0.0, count
    steps: list[list[int]] = []
    """For 1, 2, ... places: the next place behind each bin that is the first of them."""
    for _ in range(min(most, len(possible))):
        gains, nexts = [0.0] * (count + 1), [count] * count
        for index, first in enumerate(possible):
            for end in ends[index + 1 :]:
                gain = served[first][end - first - 1] + best[end]
                if gain > gains[first]:
                    gains[first], nexts[first] = gain, end
        first = max(possible, key=gains.__getitem__)
        if gains[first] - total <= price:
            break
        total, start, best = gains[first], first, gains
        steps.append(nexts)
    places: list[int] = []
    for nexts in reversed(steps):
        if start == count:
            break
        places.append(ordered[start].at)
        start = nexts[start]
    return places


def solve(wants: Sequence[Bin], most: int, price: float) -> Solution:
    """Choose places for wants along an axis, several perhaps at one place."""
    places = choose_places(merged(wants), most, price)
    left = remaining(wants, places)
    saved = dict.fromkeys(places, 0.0)
    for want, lost in zip(wants, left, strict=True):
        if lost < want.lost:
            place = max(place for place in places if place <= want.at)
            saved[place] += want.weight * (want.lost - lost)
    ranked = sorted(places, key=lambda place: -saved[place])
    return Solution(ranked, left, sum(saved.values()))


def merged(wants: Iterable[Bin]) -> list[Bin]:
    """Return one bin for each place, of the most important places only. Those with too few wants
    nearby are not possible."""
    sums: dict[int, tuple[float, float]] = {}
    for want in wants:
        weight, lost = sums.get(want.at, (0.0, 0.0))
        sums[want.at] = weight + want.weight, lost + want.weight * want.lost
    bins = []
    for at, (weight, lost) in sums.items():
        near = sum(each for other, (each, _) in sums.items() if at <= other <= at + _NEAR)
        if lost > 0:
            bins.append(Bin(at, lost / weight, weight, possible=near >= _SUPPORT))
    return sorted(bins, key=lambda each: -each.weight * each.lost)[:MAX_BINS]


def remaining(bins: Sequence[Bin], places: Sequence[int]) -> list[float]:
    """Return the blocks lost by each bin with these places."""
    found = []
    for each in bins:
        behind = [each.at - place for place in places if place <= each.at]
        found.append(min([each.lost, *behind]))
    return found


def _served(bins: Sequence[Bin]) -> list[float]:
    """Return the gain of a place at the first bin for the first one, two, ... bins."""
    at = bins[0].at
    return list(accumulate(each.weight * max(0.0, each.lost - (each.at - at)) for each in bins))
