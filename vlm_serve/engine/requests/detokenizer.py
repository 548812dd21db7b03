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
        mark: quiet text ends only with the stop strings that contain this mark.
        include_stop: the text returned ends behind the stop string instead.
        skip_special: special tokens are not part of the text.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        stop: Sequence[str] = (),
        mark: str | None = None,
        *,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._include_stop, self._skip_special = include_stop, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = tuple(stop)
        self._marked = tuple(text for text in self._stop if mark is not None and mark in text)
        self._held = ""
        self._done = False

    def push(
        self, token_id: int, *, check_stop: bool = True, quiet: int = 0
    ) -> tuple[str, str | None]:
        """Add a token. Return the text that has become final, and the stop string if one was
        completed.

        Args:
            check_stop: stop strings end the text.
            quiet: number of the token's first bytes that are quiet text.
        """
        assert not self._done, "push after the end"
        if self._skip_special and self._tokenizer.is_special(token_id):
            return self._release(self._stop if check_stop else (), final=False)
        data, before = self._tokenizer.token_bytes(token_id), ""
        if quiet:
            self._held += self._decoder.decode(data[:quiet])
            before, stop = self._release(self._marked if check_stop else (), final=False)
            if stop is not None or quiet >= len(data):
                return before, stop
        self._held += self._decoder.decode(data[quiet:])
        text, stop = self._release(self._stop if check_stop else (), final=False)
        return before + text, stop

    def finish(self, *, check_stop: bool = True) -> tuple[str, str | None]:
        """End the text and return the rest. An unfinished character becomes U+FFFD."""
        assert not self._done, "finish after the end"
        self._held += self._decoder.decode(b"", final=True)
        return self._release(self._stop if check_stop else (), final=True)

    def _release(self, stops: tuple[str, ...], *, final: bool) -> tuple[str, str | None]:
        if not stops and not final:
            text, self._held = self._held, ""
            return text, None
        if stops:
            hits = [(self._held.find(s), s) for s in stops if s in self._held]
            if hits:
                position, stop = min(hits)
                end = position + len(stop) * self._include_stop
                text, self._held, self._done = self._held[:end], "", True
                return text, stop
        keep = 0 if final else self._possible_stop_length(stops)
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        self._done = final
        return text, None

    def _possible_stop_length(self, stops: tuple[str, ...]) -> int:
        """Return the length of the longest end of the held text that begins a stop string."""
        longest = max((len(s) for s in stops), default=0) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-length:]) for s in stops):
                return length
        return 0
