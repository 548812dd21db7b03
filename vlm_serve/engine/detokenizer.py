"""Incremental detokenisation: text is released only when it can no longer change.

The bytes of an unfinished UTF-8 character are held back, and so is any end of the text that may
still become a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Return True for control tokens."""
        ...


class Detokenizer:
    """Turns the tokens of one choice into text.

    Args:
        tokenizer: provides the bytes of a token.
        stop: strings that end the text; the text returned ends before the earliest one.
        include_stop: the text returned ends behind it instead.
        skip_special: special tokens are not part of the text.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._include_stop, self._skip_special = include_stop, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = tuple(stop)
        self._held = ""
        self._done = False

    def push(self, token_id: int, *, check_stop: bool = True) -> tuple[str, str | None]:
        """Add a token. Return the text that has become final, and the stop string if one was
        completed."""
        assert not self._done, "push after the end"
        if not (self._skip_special and self._tokenizer.is_special(token_id)):
            self._held += self._decoder.decode(self._tokenizer.token_bytes(token_id))
        return self._release(check_stop=check_stop, final=False)

    def finish(self, *, check_stop: bool = True) -> tuple[str, str | None]:
        """End the text and return the rest. An unfinished character becomes U+FFFD."""
        assert not self._done, "finish after the end"
        self._held += self._decoder.decode(b"", final=True)
        return self._release(check_stop=check_stop, final=True)

    def _release(self, *, check_stop: bool, final: bool) -> tuple[str, str | None]:
        if check_stop and self._stop:
            hits = [(self._held.find(s), s) for s in self._stop if s in self._held]
            if hits:
                position, stop = min(hits)
                end = position + len(stop) * self._include_stop
                text, self._held, self._done = self._held[:end], "", True
                return text, stop
        keep = 0 if final or not check_stop else self._possible_stop_length()
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        self._done = final
        return text, None

    def _possible_stop_length(self) -> int:
        """Return the length of the longest end of the held text that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=0) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-length:]) for s in self._stop):
                return length
        return 0
