"""Matches the tokens of one choice against its compiled grammar."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vlm_serve.grammar.compiled import Compiled
from vlm_serve.grammar.matching import Matcher

FOLLOW_SECONDS = 1.0
FOLLOW_SECONDS_PER_TOKEN = 0.005
_SLOW = (
    f"following the grammar takes too long, more than {FOLLOW_SECONDS:g} s and "
    f"{1000 * FOLLOW_SECONDS_PER_TOKEN:g} ms a token; use fewer nested repetitions"
)


class FollowTime:
    """CPU time spent on matching the grammar of one request, over all its choices.

    With an ambiguous grammar every token takes longer than the one before, and matching blocks the
    engine thread. Beyond FOLLOW_SECONDS plus FOLLOW_SECONDS_PER_TOKEN per token it stops.
    """

    def __init__(self) -> None:
        self._spent = 0.0
        self._tokens = 0

    @property
    def over(self) -> bool:
        return self._spent > FOLLOW_SECONDS + FOLLOW_SECONDS_PER_TOKEN * self._tokens

    def count_token(self) -> None:
        self._tokens += 1

    def charge(self, seconds: float) -> None:
        self._spent += seconds

    @contextmanager
    def measured(self) -> Iterator[None]:
        begin = time.thread_time()
        try:
            yield
        finally:
            self._spent += time.thread_time() - begin


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar of one request.

    Attributes:
        compiled: immutable, shared between requests.
        after: the grammar applies after these bytes of the answer; b"": from its start.
        follow_time: time spent on matching so far.
    """

    compiled: Compiled
    after: bytes
    follow_time: FollowTime = field(default_factory=FollowTime, compare=False)


class GrammarState:
    """Matching state of one choice.

    Args:
        grammar: the grammar to match.
        token_bytes: returns the bytes of a token.
        vocabulary: width of the logits.

    Attributes:
        waiting: the grammar's start has not been reached.
    """

    def __init__(
        self, grammar: Grammar, token_bytes: Callable[[int], bytes], vocabulary: int
    ) -> None:
        self._matcher = Matcher(grammar.compiled)
        self._after = grammar.after
        self._time = grammar.follow_time
        self._token_bytes = token_bytes
        self._tail = b""
        self._lost = False
        self._steps = 0
        self._ahead = False
        self._uncharged: deque[tuple[int, float]] = deque()
        self.waiting = bool(grammar.after)
        self._words = np.zeros((vocabulary + 31) // 32, dtype=np.int32)

    @property
    def over_limit(self) -> str:
        """The limit at which matching has stopped, as a sentence; "": none."""
        return _SLOW if self._time.over else self._matcher.exhausted

    @property
    def finished(self) -> bool:
        """True after the end of sequence, or after a token that does not match."""
        return self._lost or self._matcher.ended

    def accept(self, token: int) -> None:
        """Advance by a sampled token."""
        if self.finished or self.over_limit:
            return
        if self._ahead:
            self._uncharged.append((token, 0.0))
            self._follow(token)
            return
        self._time.count_token()
        self._settle(token)
        with self._time.measured():
            self._follow(token)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Roll back on exit the tokens that were accepted inside, for drafts.

        The time of a mask made after such a token is charged only once that token is accepted for
        good.
        """
        before = (self.waiting, self._tail, self._lost)
        self._uncharged.clear()
        self._steps, self._ahead = 0, True
        try:
            yield
        finally:
            self._ahead = False
            self.waiting, self._tail, self._lost = before
            if self._steps:
                self._matcher.rollback(self._steps)

    def _settle(self, token: int) -> None:
        """Charge the mask that was made ahead of time after this token."""
        expected, seconds = self._uncharged.popleft() if self._uncharged else (token, 0.0)
        if expected == token:
            self._time.charge(seconds)
        else:
            self._uncharged.clear()

    def _follow(self, token: int) -> None:
        if self.waiting:
            self._find_start(self._token_bytes(token))
        elif self._matcher.accept_token(token):
            self._steps += 1
        else:
            self._lost = True  # e.g. the model computes NaN

    def _find_start(self, data: bytes) -> None:
        tail = self._tail + data
        found = tail.find(self._after)
        if found < 0:
            self._tail = tail[1 - len(self._after) :] if len(self._after) > 1 else b""
            return
        self.waiting, self._tail = False, b""
        rest = tail[found + len(self._after) :]
        # A token may extend past the marker: whitespace there belongs to neither side.
        if rest and self._matcher.accept_string(rest):
            self._steps += 1
        elif rest.strip():
            self._lost = True

    def allowed(self) -> npt.NDArray[np.uint8] | None:
        """Return a packed mask of the allowed tokens, None if all are allowed.

        Bit `i % 8` of byte `i // 8` is token i; bits beyond the vocabulary are undefined. The next
        call overwrites the array.
        """
        if self.waiting or self.finished or self.over_limit:
            return None
        begin = time.thread_time()
        self._matcher.fill(self._words)
        seconds = time.thread_time() - begin
        if self._ahead:
            token, _ = self._uncharged.pop()
            self._uncharged.append((token, seconds))
        else:
            self._time.charge(seconds)
        return None if self.over_limit else self._words.view(np.uint8)
