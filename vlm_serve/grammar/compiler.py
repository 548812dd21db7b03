"""Compiles and caches the grammars of one model, bounded in time and memory."""

from __future__ import annotations

import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable

from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar.compiled import Compiled
from vlm_serve.grammar.library import Library
from vlm_serve.grammar.process import CompileProcess
from vlm_serve.grammar.state import Grammar
from vlm_serve.preprocess.tokenizer import Tokenizer
from vlm_serve.structured_outputs import StructuredOutputs

COMPILE_SECONDS = 5.0
CACHE_BYTES = 128 << 20
CACHE_ENTRIES = 256
_LEAST_BYTES = 64 << 10
_BYTES_PER_BYTE = 24
"""Bytes of memory per byte of a source at least, where the C library cannot be asked."""
_Key = tuple[bytes, str, str, bool, bool]


class GrammarCompiler:
    """Compiles the grammars of requests. Thread-safe; `compile` blocks.

    The first grammar, or `warm`, starts the compiling process.

    Args:
        tokenizer: of the model.
        vocabulary: width of the model's logits.
        ends: end-of-answer tokens.
        seconds: time limit per grammar.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocabulary: int,
        ends: Iterable[int],
        *,
        seconds: float = COMPILE_SECONDS,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = sorted(ends)
        self._cache_lock = threading.Lock()
        self._cached: OrderedDict[_Key, tuple[Compiled, int]] = OrderedDict()
        self._library_lock = threading.Lock()
        self._guidance: Library | None = None
        self._process = CompileProcess(self._tokens, seconds)

    def compile(self, form: StructuredOutputs, after: bytes = b"", owner: bytes = b"") -> Grammar:
        """Compile a form into a grammar that applies after the bytes `after`.

        Grammars of different owners are compiled and kept apart: how long one takes would tell
        whether somebody else has used it.

        Raises InvalidRequestError for a form that is invalid, cannot be enforced, or is over a
        limit; EngineClosedError after `close`.
        """
        found = self.find(form, after, owner)
        if found is not None:
            return found
        kind, source = form.source
        try:
            answer = self._process.compile({"kind": kind, "source": source, "strict": form.strict})
        except InvalidRequestError as error:
            raise InvalidRequestError(
                error.message, param=error.param or "structured_outputs", code=error.code
            ) from None
        compiled = Compiled(self._library(), answer["grammar"], answer["lengths"])
        size = max(_LEAST_BYTES, _BYTES_PER_BYTE * len(source), answer["size"])
        self._keep(_key(form, owner), compiled, size + sys.getsizeof(source))
        return Grammar(compiled, after)

    def warm(self) -> None:
        """Start the compiling process and wait until it is ready. This takes seconds.

        Raises VlmServeError if it does not start, EngineClosedError after `close`.
        """
        self._process.start()
        self._library()

    def find(
        self, form: StructuredOutputs, after: bytes = b"", owner: bytes = b""
    ) -> Grammar | None:
        """Return the grammar if it is cached for this owner. Does not block."""
        key = _key(form, owner)
        with self._cache_lock:
            if key not in self._cached:
                return None
            self._cached.move_to_end(key)
            compiled, _ = self._cached[key]
        return Grammar(compiled, after)

    @property
    def num_bytes(self) -> int:
        """Memory of the cached grammars and their sources."""
        with self._cache_lock:
            return self._size()

    def close(self) -> None:
        """End the compiling process. May be called more than once."""
        self._process.close()

    def _library(self) -> Library:
        with self._library_lock:
            if self._guidance is None:
                encode = self._tokenizer.encode_plain
                self._guidance = Library(self._token_texts(), self._ends, encode)
            return self._guidance

    def _token_texts(self) -> list[bytes]:
        """Return the bytes of all tokens.

        One without bytes never matches: control tokens, and logits without a token.
        """
        tokenizer, known = self._tokenizer, self._tokenizer.vocab_size
        return [
            b"" if token >= known or tokenizer.is_special(token) else tokenizer.token_bytes(token)
            for token in range(self._vocabulary)
        ]

    def _tokens(self) -> str:
        """Return the vocabulary as the compiling process takes it."""
        return json.dumps([[text.decode("latin-1") for text in self._token_texts()], self._ends])

    def _keep(self, key: _Key, compiled: Compiled, size: int) -> None:
        with self._cache_lock:
            self._cached[key] = compiled, size
            while len(self._cached) > CACHE_ENTRIES or self._size() > CACHE_BYTES:
                self._cached.popitem(last=False)

    def _size(self) -> int:
        """Return the bytes of the cached grammars and their sources."""
        return sum(size for _, size in self._cached.values())


def _key(form: StructuredOutputs, owner: bytes) -> _Key:
    return (owner, *form.source, form.json_object, form.strict)
