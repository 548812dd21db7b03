"""Follows one choice through its compiled grammar."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

FOLLOW_SECONDS = 1.0
FOLLOW_SECONDS_PER_TOKEN = 0.005


class FollowTime:
    """CPU time that following the grammar of one request takes, all its choices together.

    With an ambiguous grammar every token takes longer than the one before, and it is the engine's
    own thread that waits: whoever needs more than FOLLOW_SECONDS and FOLLOW_SECONDS_PER_TOKEN is
    not followed any further.
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
    """A compiled grammar as a request uses it.

    Attributes:
        compiled: xgrammar's CompiledGrammar; immutable, shared between requests.
        after: the grammar begins behind these bytes of the answer; b"": at its start.
        matcher: makes a new matcher for `compiled`.
        follow_time: what following it has taken so far.
    """

    compiled: Any
    after: bytes
    matcher: Callable[[Any], Any]
    follow_time: FollowTime = field(default_factory=FollowTime, compare=False)


class GrammarState:
    """State of one choice.

    Args:
        grammar: what to follow.
        token_bytes: the bytes a token stands for.
        vocabulary: width of the logits.
    """

    def __init__(
        self, grammar: Grammar, token_bytes: Callable[[int], bytes], vocabulary: int
    ) -> None:
        self._matcher = grammar.matcher(grammar.compiled)
        self._after = grammar.after
        self._time = grammar.follow_time
        self._token_bytes = token_bytes
        self._tail = b""
        self._lost = False
        self._steps = 0
        self._ahead = False
        self._owed: deque[tuple[int, float]] = deque()
        self.waiting = bool(grammar.after)
        self._words = np.zeros((1, (vocabulary + 31) // 32), dtype=np.int32)

    @property
    def too_slow(self) -> bool:
        """Following the grammar has taken so long that it is no longer followed."""
        return self._time.over

    @property
    def finished(self) -> bool:
        """Nothing more can come: the end of sequence has been accepted."""
        return self._lost or bool(self._matcher.is_terminated())

    def accept(self, token: int) -> None:
        """Follows a sampled token."""
        if self.finished or self.too_slow:
            return
        if self._ahead:
            self._owed.append((token, 0.0))
            self._follow(token)
            return
        self._time.count_token()
        self._settle(token)
        with self._time.measured():
            self._follow(token)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """What is accepted inside is taken back at the end. A mask that was made behind a token is
        paid for when that token is accepted for good, and never otherwise."""
        before = (self.waiting, self._tail, self._lost)
        self._owed.clear()
        self._steps, self._ahead = 0, True
        try:
            yield
        finally:
            self._ahead = False
            self.waiting, self._tail, self._lost = before
            if self._steps:
                self._matcher.rollback(self._steps)

    def _settle(self, token: int) -> None:
        """Pays for what was made ahead behind this token."""
        expected, seconds = self._owed.popleft() if self._owed else (token, 0.0)
        if expected == token:
            self._time.charge(seconds)
        else:
            self._owed.clear()

    def _follow(self, token: int) -> None:
        if self.waiting:
            self._look_for_the_start(self._token_bytes(token))
        elif self._matcher.accept_token(token):
            self._steps += 1
        else:
            self._lost = True  # e.g. a model that computes NaN

    def _look_for_the_start(self, data: bytes) -> None:
        tail = self._tail + data
        found = tail.find(self._after)
        if found < 0:
            self._tail = tail[1 - len(self._after) :] if len(self._after) > 1 else b""
            return
        self.waiting, self._tail = False, b""
        rest = tail[found + len(self._after) :]
        # A token may hold more than the marker's end: white space there belongs to neither side.
        if rest and self._matcher.accept_string(rest):
            self._steps += 1
        elif rest.strip():
            self._lost = True

    def allowed(self) -> npt.NDArray[np.uint8] | None:
        """The tokens that may come next, packed: bit `i % 8` of byte `i // 8` stands for token i,
        those beyond the vocabulary mean nothing. None: all. The next call overwrites it."""
        if self.waiting or self.finished or self.too_slow:
            return None
        begin = time.thread_time()
        restricts = self._matcher.fill_next_token_bitmask(self._words)
        seconds = time.thread_time() - begin
        if self._ahead:
            token, _ = self._owed.pop()
            self._owed.append((token, seconds))
        else:
            self._time.charge(seconds)
        return self._words.view(np.uint8)[0] if restricts else None
