"""Follows one choice through its compiled grammar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

THINK_END = b"</think>"
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
        self._time.count_token()
        with self._time.measured():
            if self.waiting:
                self._look_for_the_start(self._token_bytes(token))
            elif not self._matcher.accept_token(token):
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
        if rest and not self._matcher.accept_string(rest) and rest.strip():
            self._lost = True

    def allowed(self) -> npt.NDArray[np.uint8] | None:
        """The tokens that may come next, packed: bit `i % 8` of byte `i // 8` stands for token i,
        those beyond the vocabulary mean nothing. None: all. The next call overwrites it."""
        if self.waiting or self.finished or self.too_slow:
            return None
        with self._time.measured():
            restricts = self._matcher.fill_next_token_bitmask(self._words)
        return self._words.view(np.uint8)[0] if restricts else None
