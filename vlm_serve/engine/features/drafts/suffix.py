"""Drafts from earlier text: the sequence itself, a prediction sent with the request, and earlier
answers of the same model to the same tenant.

After Saxena 2023, "Prompt lookup decoding", and Oliaro et al. 2024, "SuffixDecoding".
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from itertools import count, islice
from typing import NamedTuple

from vlm_serve.engine.features.drafts.base import MAX_EVIDENCE
from vlm_serve.engine.requests.sequence import Sequence

ORDER = 3
"""Minimum number of equal tokens in a row for a match."""
MAX_COMPARED, MAX_TRIED = 32, 8
NEAR = 4
_BITS = 21
BYTES_PER_TOKEN = 200
"""Bytes per token of an earlier answer: its dictionary entry, its predecessor link, and the
token."""
ANSWER_BYTES = 64 << 20
"""Maximum bytes of all earlier answers."""
CONTEXT_BYTES = 12
"""Bytes per token of the prompt before an answer; these are only compared."""
MAX_MISSED = 4
"""Maximum number of mismatches, roughly in a row, before the followed text yields no more
drafts."""
MAX_PROMPT_TOKENS = 1 << 14
"""Number of tokens at the end of a prompt that are searched."""


def key(tokens: Tokens[int], end: int) -> int:
    """Return the ORDER tokens before position `end` as one number."""
    first, second, third = tokens[end - ORDER : end]
    return (first << 2 * _BITS) | (second << _BITS) | third


def common(text: Tokens[int], at: int, tokens: Tokens[int]) -> int:
    """Count the tokens before `at` that equal the last ones of `tokens`, at most `MAX_COMPARED`."""
    most, end = min(at, len(tokens), MAX_COMPARED), len(tokens)
    length = 0
    while length < most and text[at - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class TextMatch(NamedTuple):
    """Earlier occurrence of the last tokens: a text, the index of the token behind the occurrence,
    and the number of equal tokens."""

    text: Tokens[int]
    at: int
    length: int


class IndexedText:
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
        known = self.tokens
        for token in tokens:
            earlier = 0
            if len(known) >= ORDER:
                last = key(known, len(known))
                earlier = self._places.get(last, 0)
                self._places[last] = len(known)
            self._earlier.append(earlier)
            known.append(token)

    def find(self, tokens: Tokens[int]) -> TextMatch | None:
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
        tokens, begin = self.tokens, len(self.tokens) - count
        last = tokens[begin:]
        at = -1
        try:
            while at < 0 or tokens[at : at + count] != last:
                at = tokens.index(last[0], at + 1, begin)
        except ValueError:
            return None
        return TextMatch(tokens, at + count, count)


class Answers:
    """Earlier answers of one tenant and adapter.

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

    def find(self, tokens: Tokens[int]) -> TextMatch | None:
        """Find the longest occurrence in all texts, as `IndexedText.find` does."""
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


def nearest(text: Tokens[int], at: int, token: int, *, lost: bool) -> int:
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


def repeated(tokens: Tokens[int], at: int, limit: int) -> tuple[int, ...]:
    """Return up to `limit` tokens from `at` on. Where the text ends, it continues by repeating
    them."""
    continuation = list(islice(tokens, at, at + limit))
    period = len(tokens) - at
    while 0 < period <= len(continuation) < limit:
        continuation.append(continuation[len(continuation) - period])
    return tuple(continuation)


class _Follower:
    """Follows a sequence through texts that it may repeat."""

    def __init__(self, sequence: Sequence, answers: Answers | None) -> None:
        self._seen = max(0, len(sequence.prompt) - MAX_PROMPT_TOKENS)
        self._history = IndexedText()
        self._answers = answers
        self._prediction = IndexedText(sequence.request.prediction)
        self._text: Tokens[int] = self._prediction.tokens
        self._position = 0
        # Number of equal tokens so far. A prediction is trusted from the start.
        self._length = MAX_EVIDENCE if sequence.request.prediction else 0
        self._missed = 0
        self._start = len(sequence.prompt)

    @property
    def evidence(self) -> int:
        """Number of equal tokens in the followed text, at most `MAX_EVIDENCE`."""
        return min(self._length, MAX_EVIDENCE)

    def propose(self, tokens: list[int], limit: int) -> tuple[int, ...]:
        new = tokens[self._seen :]
        for position, token in enumerate(new, self._seen):
            if position >= self._start:
                self._follow(token)
        self._history.extend(new)
        self._seen = len(tokens)
        if self._length < ORDER or self._position >= len(self._text):
            self._look_up()
        if self._missed > MAX_MISSED or not self._position < len(self._text):
            return ()
        if self._text is self._history.tokens:
            return repeated(self._text, self._position, limit)
        return tuple(self._text[self._position : self._position + limit])

    def _follow(self, token: int) -> None:
        """Advance by one token in the followed text. After a mismatch, keep following: the next
        tokens may be equal again."""
        held = self._position < len(self._text) and self._text[self._position] == token
        if held:
            self._position, self._length = self._position + 1, self._length + 1
            self._missed = 0 if self._length >= ORDER else self._missed
        else:
            self._position = nearest(self._text, self._position, token, lost=not self._length)
            self._length = 0
            self._missed += 1

    def _look_up(self) -> None:
        """Move to the longest match of the latest tokens.

        The first tokens of an answer match their first occurrence in the prompt: copies start where
        a text starts. A text with a single mismatch is not left for a short match elsewhere.
        """
        history, generated = self._history.tokens, self._seen - self._start
        best = longer(self._prediction.find(history), self._history.find(history))
        if self._answers is not None:
            best = longer(best, self._answers.find(history))
        if best is None and 0 < generated < ORDER:
            best = self._history.first(generated)
        follows = self._missed <= 1 and self._position < len(self._text)
        if best is not None and (best.length > ORDER or not follows):
            # Count equal tokens of the answer only: equal prompts say little about answers.
            self._text, self._position = best.text, best.at
            self._length = min(best.length, generated)
            self._missed = int(self._length < ORDER)


class SuffixDrafter:
    """Drafts by suffix lookup. A token costs a few lookups, whatever the length of the texts.

    Args:
        most_bytes: maximum bytes of earlier answers; the oldest are removed first.

    Attributes:
        num_bytes: bytes of the stored answers.
    """

    def __init__(self, most_bytes: int = ANSWER_BYTES) -> None:
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._followers: dict[int, _Follower] = {}
        self._answers: dict[bytes, Answers] = {}
        self._order: OrderedDict[int, tuple[bytes, int]] = OrderedDict()
        self._numbers = count()

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        follower = self._followers.get(sequence.number)
        if follower is None:
            follower = _Follower(sequence, self._answers.get(sequence.keys.owners.prompt))
            self._followers[sequence.number] = follower
        return follower.propose(sequence.token_ids, limit)

    def evidence(self, sequence: Sequence) -> int:
        return self._followers[sequence.number].evidence

    def forget(self, sequence: Sequence) -> None:
        self._followers.pop(sequence.number, None)
        before, generated_ids = sequence.info.token_ids[-MAX_COMPARED:], sequence.generated
        size = len(before) * CONTEXT_BYTES + len(generated_ids) * BYTES_PER_TOKEN
        if sequence.request.cold or not generated_ids or size > self._most_bytes:
            return
        while self.num_bytes + size > self._most_bytes:
            self._remove_oldest()
        number, owner = next(self._numbers), sequence.keys.owners.prompt
        text = array("i", (*before, *generated_ids))
        self._answers.setdefault(owner, Answers()).add(number, text, first=len(before))
        self._order[number] = owner, size
        self.num_bytes += size

    def _remove_oldest(self) -> None:
        number, (owner, size) = self._order.popitem(last=False)
        answers = self._answers[owner]
        self.num_bytes -= size
        answers.remove(number)
        if not answers.texts:
            del self._answers[owner]
