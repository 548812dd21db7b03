"""Follows one answer with llguidance."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vlm_serve.grammar.library import Library


class Matcher:
    """Follows one answer, with the methods of xgrammar's matcher.

    Args:
        matcher: llguidance's, at its start.
        library: the one that it comes from.

    Attributes:
        exhausted: a limit of llguidance was reached, so nothing can be said of the next token.
    """

    def __init__(self, matcher: Any, library: Library) -> None:
        self._matcher = matcher
        self._tokenizer = library.tokenizer
        self._ends = library.ends
        self._steps: list[int] = []  # tokens of each step; 0: the end
        self._ended = False
        self.exhausted = False

    def is_terminated(self) -> bool:
        """Return True after an end-of-answer token."""
        return self._ended

    def accept_token(self, token: int) -> bool:
        """Advance by a token; return False if it does not match."""
        if self._ended:
            return False
        if token in self._ends:
            self._ended = bool(self._matcher.is_accepting())
            if self._ended:
                self._steps.append(0)
            return self._ended
        return self._consume([token])

    def accept_string(self, data: bytes) -> bool:
        """Advance by bytes, as one step."""
        return not self._ended and self._consume(self._tokenizer.tokenize_bytes(data))

    def _consume(self, tokens: list[int]) -> bool:
        # A token that does not match would leave the matcher in an error for good.
        if not tokens or self._matcher.validate_tokens(tokens) < len(tokens):
            return False
        self._steps.append(len(tokens))
        self.exhausted |= not self._matcher.consume_tokens(tokens)
        return not self.exhausted

    def rollback(self, steps: int) -> None:
        """Go back by a number of steps."""
        taken = self._steps[len(self._steps) - steps :]
        del self._steps[len(self._steps) - steps :]
        self._ended = False
        if count := sum(taken):
            self._matcher.rollback(count)

    def fill_next_token_bitmask(self, words: npt.NDArray[np.int32]) -> bool:
        """Write the mask of the allowed tokens; return True since it restricts them."""
        if self._matcher.is_stopped():
            words[:] = 0
        else:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            self.exhausted |= self._matcher.is_error()
        # The library knows one end alone.
        bits = words.view(np.uint8)[0]
        for token in self._ends if self._matcher.is_accepting() else ():
            bits[token // 8] |= 1 << token % 8
        return True
