"""Search for earlier occurrences of tokens, and for the place to continue in a text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

ORDER = 3
"""Minimum number of equal tokens in a row for a match."""
MAX_COMPARED, MAX_TRIED = 32, 8
NEAR = 4
_BITS = 21


def key(tokens: Sequence[int], end: int) -> int:
    """Return the ORDER tokens before position `end` as one number."""
    first, second, third = tokens[end - ORDER : end]
    return (first << 2 * _BITS) | (second << _BITS) | third


def common(text: Sequence[int], at: int, tokens: Sequence[int]) -> int:
    """Count the tokens before `at` that equal the last ones of `tokens`, at most `MAX_COMPARED`."""
    most, end = min(at, len(tokens), MAX_COMPARED), len(tokens)
    length = 0
    while length < most and text[at - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class TextMatch(NamedTuple):
    """Earlier occurrence of the last tokens: a text, the index of the token behind the occurrence,
    and the number of equal tokens."""

    text: Sequence[int]
    at: int
    length: int


class Text:
    """Growing text with an index of the occurrences of every ORDER tokens.

    Attributes:
        tokens: all tokens.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i")
        self._places: dict[int, int] = {}
        self._earlier = array("i")  # per position, the previous one with the same key, or 0
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
        """Find the longest earlier occurrence of the last tokens, at least ORDER of them. Only the
        latest MAX_TRIED occurrences are compared; the latest wins ties."""
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
        """Find the first occurrence of the last `count` tokens before themselves."""
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
    """Earlier answers with a common root key.

    Attributes:
        texts: texts by number, ascending. The oldest are removed first.
    """

    def __init__(self) -> None:
        self.texts: dict[int, array[int]] = {}
        self._places: dict[int, int] = {}
        self._earlier: dict[int, array[int]] = {}

    def add(self, number: int, tokens: array[int], first: int = 0) -> None:
        """Add a text. Only tokens from index `first` on can be found."""
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
        """Find the longest occurrence in all texts, as `Text.find` does."""
        if len(tokens) < ORDER:
            return None
        place, best = self._places.get(key(tokens, len(tokens)), -1), None
        for _ in range(MAX_TRIED):
            number, at = place >> 32, place & 0xFFFFFFFF
            # No occurrence, or a removed text: its links lead to older ones only.
            if number not in self.texts:
                break
            text = self.texts[number]
            best = longer(best, TextMatch(text, at, common(text, at, tokens)))
            place = self._earlier[number][at]
        return best


def longer(best: TextMatch | None, other: TextMatch | None) -> TextMatch | None:
    """Return the longer match; the first one in a tie."""
    if best is None or (other is not None and other.length > best.length):
        return other
    return best


def nearest(text: Sequence[int], at: int, token: int, *, lost: bool) -> int:
    """Return the index at which to continue in a text after a mismatch at `at`.

    By default the token counts as a substitution. If it equals the next expected token and nothing
    else nearby, a token was left out. If the previous token mismatched too (`lost`), continue
    behind the nearest equal token: text may have been inserted or left out.
    """
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
    """Return up to `limit` tokens from `at` on. Where the text ends, it continues by repeating
    them."""
    found = list(islice(tokens, at, at + limit))
    period = len(tokens) - at
    while 0 < period <= len(found) < limit:
        found.append(found[len(found) - period])
    return tuple(found)
