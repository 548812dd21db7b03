"""Follows one answer with llguidance."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vlm_serve.grammar.compiled import Compiled
from vlm_serve.grammar.lengths import Place
from vlm_serve.grammar.library import is_of_lexer, limit

_RENEWALS = 2
"""Other lexers tried for one token: one in use by other answers, and a fresh one."""


class Matcher:
    """Follows one answer.

    Args:
        compiled: its grammar.

    Attributes:
        ended: True after an end-of-answer token.
        exhausted: the limit of llguidance reached, as a sentence: nothing is known of the next
            token. "": none.
    """

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._counter = compiled.counter
        self._matcher, self._lexer = compiled.matcher()
        self._tokenizer = compiled.library.tokenizer
        self._ends = compiled.library.ends
        self._tokens: list[int] = []
        self._steps: list[int] = []  # tokens of each step; 0: the end
        self._places: list[Place] = [Place()]  # before each step, and now
        self.ended = False
        self.exhausted = ""

    def accept_token(self, token: int) -> bool:
        """Advance by a token; return False if it does not match."""
        if self.ended:
            return False
        if token not in self._ends:
            return self._consume([token])
        self.ended = bool(self._matcher.is_accepting())
        if self.ended:
            self._steps.append(0)
            self._places.append(self._places[-1])
        return self.ended

    def accept_string(self, data: bytes) -> bool:
        """Advance by bytes, as one step."""
        return not self.ended and self._consume(self._tokenizer.tokenize_bytes(data))

    def _consume(self, tokens: list[int]) -> bool:
        place: Place | None = self._places[-1]
        if self._counter is not None:
            for token in tokens:
                place = self._counter.token_after(place, token) if place is not None else None
        if not tokens or place is None or not self._matches(tokens):
            return False
        self._steps.append(len(tokens))
        self._places.append(place)
        self._tokens += tokens
        return True

    def _matches(self, tokens: list[int]) -> bool:
        """Advance the library by tokens if they match."""
        for last in range(_RENEWALS, -1, -1):
            # A token that does not match would leave the matcher in an error for good.
            matching = self._matcher.validate_tokens(tokens) == len(tokens)
            if matching and self._matcher.consume_tokens(tokens):
                return True
            if not self._matcher.is_error() or not self._renewed(last):
                break
        return False

    def _renewed(self, tries: int) -> bool:
        """Go on with another lexer after one has reached a limit, unless it did so for this token.

        A lexer keeps its states for all answers, so it fills up over time.
        """
        error = self._matcher.get_error()
        found = self._compiled.renewed(self._lexer) if tries and is_of_lexer(error) else None
        if found is None:
            self.exhausted = limit(error)
            return False
        self._matcher, self._lexer = found
        replayed = not self._tokens or self._matcher.consume_tokens(self._tokens)
        return replayed or self._renewed(tries - 1)

    def rollback(self, steps: int) -> None:
        """Go back by a number of steps."""
        kept = len(self._steps) - steps
        count = sum(self._steps[kept:])
        del self._steps[kept:], self._places[kept + 1 :]
        self.ended = False
        if count:
            del self._tokens[len(self._tokens) - count :]
            self._matcher.rollback(count)

    def fill(self, words: npt.NDArray[np.int32]) -> None:
        """Write the packed mask of the allowed tokens."""
        if self._matcher.is_stopped():
            words[:] = 0
        else:
            for last in range(_RENEWALS, -1, -1):
                self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
                if not self._matcher.is_error() or not self._renewed(last):
                    break
        bits = words.view(np.uint8)
        if self._counter is not None:
            self._counter.narrow(self._places[-1], bits)
        # The library knows one end alone.
        for token in self._ends if self._matcher.is_accepting() else ():
            bits[token // 8] |= 1 << token % 8
