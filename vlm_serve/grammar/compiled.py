"""A grammar of llguidance, ready to be followed many times."""

from __future__ import annotations

import threading
import time
from typing import Any

from vlm_serve.grammar.lengths import Counter, Lengths
from vlm_serve.grammar.library import Library

RENEW_SECONDS = 0.25


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
