"""Tokens that may come again, and where to go on in them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

ORDER = 3
"""So many tokens in a row must have come before for what followed them to be a guess."""
MOST_COMPARED = 32
_BITS = 21


def key(tokens: Sequence[int], end: int) -> int:
    """The ORDER tokens before position `end`, as one number."""
    first, second, third = tokens[end - ORDER : end]
    return (first << 2 * _BITS) | (second << _BITS) | third


def common(text: Sequence[int], at: int, tokens: Sequence[int]) -> int:
    """How many tokens before `at` are the last ones of `tokens` too, as far as is worth knowing."""
    most, end = min(at, len(tokens), MOST_COMPARED), len(tokens)
    length = 0
    while length < most and text[at - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class Text:
    """A text that grows, with the place behind the last occurrence of every ORDER tokens in it.

    Attributes:
        tokens: all of them.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i")
        self._places: dict[int, int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        own = self.tokens
        for token in tokens:
            if len(own) >= ORDER:
                self._places[key(own, len(own))] = len(own)
            own.append(token)

    def find(self, tokens: Sequence[int]) -> int | None:
        """Where the last ORDER of some tokens were last followed by another one: its index."""
        return self._places.get(key(tokens, len(tokens))) if len(tokens) >= ORDER else None


class Answers:
    """Texts of one origin, of which the latest occurrence of any ORDER tokens counts.

    Attributes:
        texts: by their numbers.
    """

    def __init__(self) -> None:
        self.texts: dict[int, array[int]] = {}
        self._places: dict[int, int] = {}

    def add(self, number: int, tokens: array[int]) -> None:
        self.texts[number] = tokens
        for end in range(ORDER, len(tokens)):
            self._places[key(tokens, end)] = number << 32 | end

    def remove(self, number: int) -> None:
        tokens = self.texts.pop(number)
        for end in range(ORDER, len(tokens)):
            place = key(tokens, end)
            if self._places.get(place, -1) >> 32 == number:
                del self._places[place]

    def find(self, tokens: Sequence[int]) -> tuple[array[int], int] | None:
        """A text and the index in it of what followed the last ORDER tokens."""
        if len(tokens) < ORDER:
            return None
        place = self._places.get(key(tokens, len(tokens)))
        return None if place is None else (self.texts[place >> 32], place & 0xFFFFFFFF)


def repeated(tokens: Sequence[int], at: int, limit: int) -> tuple[int, ...]:
    """What comes from `at` on in a text that grows: where it ends it goes on repeating itself."""
    found = list(islice(tokens, at, at + limit))
    period = len(tokens) - at
    while 0 < period <= len(found) < limit:
        found.append(found[len(found) - period])
    return tuple(found)
