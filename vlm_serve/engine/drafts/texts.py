"""Tokens that may come again, and where to go on in them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

ORDER = 3
"""So many tokens in a row must have come before for what followed them to be a guess."""
MAX_COMPARED, MAX_TRIED = 32, 8
NEAR = 4
_BITS = 21


def key(tokens: Sequence[int], end: int) -> int:
    """The ORDER tokens before position `end`, as one number."""
    first, second, third = tokens[end - ORDER : end]
    return (first << 2 * _BITS) | (second << _BITS) | third


def common(text: Sequence[int], at: int, tokens: Sequence[int]) -> int:
    """How many tokens before `at` are the last ones of `tokens` too, as far as is worth knowing."""
    most, end = min(at, len(tokens), MAX_COMPARED), len(tokens)
    length = 0
    while length < most and text[at - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class TextMatch(NamedTuple):
    """Where the end of some tokens has come before: the index in a text of what followed it, and
    how many tokens are the same."""

    text: Sequence[int]
    at: int
    length: int


class Text:
    """A text that grows, with the places behind the occurrences of every ORDER tokens in it.

    Attributes:
        tokens: all of them.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i")
        self._places: dict[int, int] = {}
        self._earlier = array("i")  # for every place the one before it with the same tokens, or 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        own = self.tokens
        for token in tokens:
            earlier = 0
            if len(own) >= ORDER:
                last = key(own, len(own))
                earlier = self._places.get(last, 0)
                self._places[last] = len(own)
            self._earlier.append(earlier)
            own.append(token)

    def find(self, tokens: Sequence[int]) -> TextMatch | None:
        """Where most of the last tokens, at least ORDER, were followed by another one; the latest
        of equals, among the latest MOST_TRIED."""
        if len(tokens) < ORDER:
            return None
        place, best = self._places.get(key(tokens, len(tokens)), 0), None
        for _ in range(MAX_TRIED):
            if not place:
                break
            best = longer(best, TextMatch(self.tokens, place, common(self.tokens, place, tokens)))
            place = self._earlier[place]
        return best

    def first(self, count: int) -> TextMatch | None:
        """Where the last `count` tokens have come first, before all of them."""
        own, begin = self.tokens, len(self.tokens) - count
        last = own[begin:]
        at = -1
        try:
            while at < 0 or own[at : at + count] != last:
                at = own.index(last[0], at + 1, begin)
        except ValueError:
            return None
        return TextMatch(own, at + count, count)


class Answers:
    """Texts of one origin.

    Attributes:
        texts: by their numbers, which ascend. The oldest ones are removed first.
    """

    def __init__(self) -> None:
        self.texts: dict[int, array[int]] = {}
        self._places: dict[int, int] = {}
        self._earlier: dict[int, array[int]] = {}

    def add(self, number: int, tokens: array[int], first: int = 0) -> None:
        """A text; only what comes from its `first` token on is ever guessed."""
        self.texts[number] = tokens
        earlier = self._earlier[number] = array("q", [-1]) * len(tokens)
        for end in range(max(ORDER, first), len(tokens)):
            last = key(tokens, end)
            earlier[end] = self._places.get(last, -1)
            self._places[last] = number << 32 | end

    def remove(self, number: int) -> None:
        tokens = self.texts.pop(number)
        del self._earlier[number]
        for end in range(ORDER, len(tokens)):
            place = key(tokens, end)
            if self._places.get(place, -1) >> 32 == number:
                del self._places[place]

    def find(self, tokens: Sequence[int]) -> TextMatch | None:
        """As `Text.find`, in all of the texts."""
        if len(tokens) < ORDER:
            return None
        place, best = self._places.get(key(tokens, len(tokens)), -1), None
        for _ in range(MAX_TRIED):
            number, at = place >> 32, place & 0xFFFFFFFF
            if number not in self.texts:  # There is none, or what is left is older still.
                break
            text = self.texts[number]
            best = longer(best, TextMatch(text, at, common(text, at, tokens)))
            place = self._earlier[number][at]
        return best


def longer(best: TextMatch | None, other: TextMatch | None) -> TextMatch | None:
    """The longer one; the first of equals."""
    if best is None or (other is not None and other.length > best.length):
        return other
    return best


def nearest(text: Sequence[int], at: int, token: int, *, lost: bool) -> int:
    """Where to go on in a text that was to go on at `at`, when a token has come that is another
    one: as if it stood for the one that was expected, or behind the next one, if it is that and
    nowhere else nearby. If the one before it was another one too (`lost`), behind the nearest of
    its kind: text may have been put in or left out."""
    if lost:
        for distance in range(1, NEAR + 1):
            for place in (at - distance, at + distance):
                if 0 <= place < len(text) and text[place] == token:
                    return place + 1
        return at + 1
    nearby = text[max(0, at - NEAR) : at + 1 + NEAR]
    left_out = token in text[at + 1 : at + 2] and nearby.count(token) == 1
    return at + 2 if left_out else at + 1


def repeated(tokens: Sequence[int], at: int, limit: int) -> tuple[int, ...]:
    """What comes from `at` on in a text that grows: where it ends it goes on repeating itself."""
    found = list(islice(tokens, at, at + limit))
    period = len(tokens) - at
    while 0 < period <= len(found) < limit:
        found.append(found[len(found) - period])
    return tuple(found)
