"""Matches the tokens of one choice against its compiled grammar."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vlm_serve.grammar.lengths import Counter, Lengths, TextPlace
from vlm_serve.grammar.library import Library, is_of_lexer, limit

FOLLOW_SECONDS = 1.0
FOLLOW_SECONDS_PER_TOKEN = 0.005
RENEW_SECONDS = 0.25
_RENEWALS = 2
"""Other lexers tried for one token: one in use by other answers, and a fresh one."""
_SLOW = (
    f"following the grammar takes too long, more than {FOLLOW_SECONDS:g} s and "
    f"{1000 * FOLLOW_SECONDS_PER_TOKEN:g} ms a token; use fewer nested repetitions"
)


class Compiled:
    """One grammar. Its matchers share a lexer, and all their texts add to its states.

    Args:
        library: of its tokenizer.
        grammar: in the library's own form; it has no errors.
        lengths: bounds of texts, left out of the grammar.

    Attributes:
        library: see above.
        counter: follows these bounds; None: there are none.
    """

    def __init__(self, library: Library, grammar: str, lengths: Lengths) -> None:
        self.library = library
        self.counter = Counter(lengths, library.token_texts) if lengths else None
        self._grammar = grammar
        self._lock = threading.Lock()
        begin = time.thread_time()
        self._start, _ = library.parsed(grammar)
        self._renewable = time.thread_time() - begin < RENEW_SECONDS

    def matcher(self) -> tuple[Any, Any]:
        """Return a new matcher, and an object in place of its lexer."""
        with self._lock:
            return self._start.deep_copy(), self._start

    def renewed(self, lexer: Any) -> tuple[Any, Any] | None:
        """Return the same with another lexer.

        None if that would take longer than RENEW_SECONDS, since it blocks the engine thread.
        """
        with self._lock:
            if lexer is self._start:
                if not self._renewable:
                    return None
                self._start, _ = self.library.parsed(self._grammar)
            return self._start.deep_copy(), self._start


@dataclass(slots=True)
class FollowTime:
    """CPU time spent on matching the grammar of one request, over all its choices.

    With an ambiguous grammar every token takes longer than the one before, and matching blocks the
    engine thread. Beyond FOLLOW_SECONDS plus FOLLOW_SECONDS_PER_TOKEN per token it stops.
    """

    seconds: float = 0.0
    tokens: int = 0

    @property
    def over(self) -> bool:
        return self.seconds > FOLLOW_SECONDS + FOLLOW_SECONDS_PER_TOKEN * self.tokens


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar of one request.

    Attributes:
        compiled: immutable, shared between requests.
        after: the grammar applies after these bytes of the answer; b"": from its start. White space
            at their end is enforced too.
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
        forced: tokens of the white space before the grammar; they come next, one by one.
        finished: the answer has ended, or a token did not match.
    """

    def __init__(
        self, grammar: Grammar, token_bytes: Callable[[int], bytes], vocabulary: int
    ) -> None:
        self._compiled = grammar.compiled
        self._counter = grammar.compiled.counter
        self._matcher, self._lexer = grammar.compiled.matcher()
        self._ends = grammar.compiled.library.ends
        self._mark = grammar.after.rstrip()
        self._space = grammar.after[len(self._mark) :]
        self.forced: tuple[int, ...] = ()
        self._time = grammar.follow_time
        self._token_bytes = token_bytes
        self._tail = b""
        self._exhausted = ""  # the limit of llguidance reached: nothing is known of the next token
        # tokens of each step, and the place behind it; the first one is the start
        self._steps: list[tuple[list[int], TextPlace]] = [([], TextPlace())]
        self._ahead = False
        self._uncharged: deque[tuple[int, float]] = deque()
        self.waiting, self.finished = bool(grammar.after), False
        self._words = np.zeros((vocabulary + 31) // 32, dtype=np.int32)

    @property
    def over_limit(self) -> str:
        """The limit at which matching has stopped, as a sentence; "": none."""
        return _SLOW if self._time.over else self._exhausted

    def accept(self, token: int) -> None:
        """Advance by a sampled token."""
        if self.finished or self.over_limit:
            return
        if self._ahead:
            self._uncharged.append((token, 0.0))
            self._follow(token)
            return
        self._time.tokens += 1
        self._settle(token)
        begin = time.thread_time()
        self._follow(token)
        self._time.seconds += time.thread_time() - begin

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Roll back on exit the tokens that were accepted inside, for drafts.

        The time of a mask made after such a token is charged only once that token is accepted for
        good.
        """
        before = (self.waiting, self.finished, self._tail, self.forced)
        kept = len(self._steps)
        self._uncharged.clear()
        self._ahead = True
        try:
            yield
        finally:
            self._ahead = False
            self.waiting, self.finished, self._tail, self.forced = before
            count = sum(len(tokens) for tokens, _ in self._steps[kept:])
            del self._steps[kept:]
            if count:
                self._matcher.rollback(count)

    def _settle(self, token: int) -> None:
        """Charge the mask that was made ahead of time after this token."""
        expected, seconds = self._uncharged.popleft() if self._uncharged else (token, 0.0)
        if expected == token:
            self._time.seconds += seconds
        else:
            self._uncharged.clear()

    def _follow(self, token: int) -> None:
        if self.waiting:
            self._find_start(self._token_bytes(token))
        elif self.forced:
            self.forced = self.forced[1:]
        elif token in self._ends or not self._consume([token]):
            self.finished = True  # no token matches if, e.g., the model computes NaN

    def _find_start(self, data: bytes) -> None:
        tail = self._tail + data
        at = tail.find(self._mark)
        if at < 0:
            self._tail = tail[1 - len(self._mark) :] if len(self._mark) > 1 else b""
            return
        self.waiting, self._tail = False, b""
        # A token may extend past the marker. Other white space there belongs to neither side.
        rest = tail[at + len(self._mark) :]
        if self._space.startswith(rest):
            self.forced = tuple(self._tokens(self._space[len(rest) :]))
        elif not self._consume(self._tokens(rest.removeprefix(self._space))) and rest.strip():
            self.finished = True

    def _tokens(self, text: bytes) -> list[int]:
        return list(self._compiled.library.tokenizer.tokenize_bytes(text)) if text else []

    def _consume(self, tokens: list[int]) -> bool:
        """Advance by tokens, as one step; return False if they do not match."""
        place: TextPlace | None = self._steps[-1][1]
        if self._counter is not None:
            for token in tokens:
                place = self._counter.token_after(place, token) if place is not None else None
        if not tokens or place is None or not self._with_lexers(lambda: self._matches(tokens)):
            return False
        self._steps.append((tokens, place))
        return True

    def _matches(self, tokens: list[int]) -> bool:
        """Advance the library by tokens if they match."""
        # A token that does not match would leave the matcher in an error for good.
        matching = self._matcher.validate_tokens(tokens) == len(tokens)
        return matching and bool(self._matcher.consume_tokens(tokens))

    def _with_lexers(self, work: Callable[[], bool]) -> bool:
        """Do work of the matcher, with other lexers where one is used up; return its success."""
        for last in range(_RENEWALS, -1, -1):
            if work():
                return True
            if not self._matcher.is_error() or not self._renewed(last):
                break
        return False

    def _renewed(self, tries: int) -> bool:
        """Go on with another lexer after one has reached a limit, unless it did so for this token.

        A lexer keeps its states for all answers, so it fills up over time.
        """
        error = self._matcher.get_error()
        renewed = self._compiled.renewed(self._lexer) if tries and is_of_lexer(error) else None
        if renewed is None:
            self._exhausted = limit(error)
            return False
        self._matcher, self._lexer = renewed
        tokens = [token for step, _ in self._steps for token in step]
        replayed = not tokens or self._matcher.consume_tokens(tokens)
        return replayed or self._renewed(tries - 1)

    def allowed(self) -> npt.NDArray[np.uint8] | None:
        """Return a packed mask of the allowed tokens, None if all are allowed.

        Bit `i % 8` of byte `i // 8` is token i; bits beyond the vocabulary are undefined. The next
        call overwrites the array.
        """
        if self.waiting or self.finished or self.over_limit:
            return None
        begin = time.thread_time()
        self._fill_words()
        seconds = time.thread_time() - begin
        if self._ahead:
            token, _ = self._uncharged.pop()
            self._uncharged.append((token, seconds))
        else:
            self._time.seconds += seconds
        return None if self.over_limit else self._words.view(np.uint8)

    def _fill_words(self) -> None:
        """Write the packed mask of the allowed tokens."""
        bits = self._words.view(np.uint8)
        if self.forced or self._matcher.is_stopped():
            self._words[:] = 0
        else:
            self._with_lexers(self._computes_mask)
        for token in self.forced[:1]:
            bits[token // 8] = 1 << token % 8
            return
        if self._counter is not None:
            self._counter.narrow(self._steps[-1][1], bits)
        # The library knows one end alone.
        for token in self._ends if self._matcher.is_accepting() else ():
            bits[token // 8] |= 1 << token % 8

    def _computes_mask(self) -> bool:
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        return not self._matcher.is_error()
