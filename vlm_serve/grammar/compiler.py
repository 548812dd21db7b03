"""Compiles and caches the grammars of one model, bounded in time and memory.

llguidance follows JSON schemas, whose keywords it intersects. xgrammar follows all other forms.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from vlm_serve.errors import EngineClosedError, InvalidRequestError
from vlm_serve.grammar.json_grammars import JsonGrammars
from vlm_serve.grammar.process import CompileProcess
from vlm_serve.grammar.schema import check_schema
from vlm_serve.grammar.state import Grammar
from vlm_serve.preprocess.tokenizer import Tokenizer
from vlm_serve.structured_outputs import StructuredOutputs

COMPILE_SECONDS = 5.0
CACHE_BYTES = 128 << 20
CACHE_ENTRIES = 256
_MEMORY_FACTOR = 1.5
"""Bytes of memory per byte of a serialised grammar: large ones measured 1.44 and 1.47.
xgrammar's own figure is 1.03 to 1.05."""


class GrammarCompiler:
    """Compiles the grammars of requests. Thread-safe; `compile` blocks.

    The first grammar, or `warm`, imports xgrammar and starts the compiling process.

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
        self._seconds = seconds
        self._lock = threading.Lock()
        self._cache_lock = threading.Lock()
        self._cached: OrderedDict[tuple[str, str, bool, bool], tuple[Any, int]] = OrderedDict()
        self._json_lock = threading.Lock()
        self._json: JsonGrammars | None = None
        self._info: Any = None
        self._process: CompileProcess | None = None
        self._closed = False

    def compile(self, form: StructuredOutputs, after: bytes = b"") -> Grammar:
        """Compile a form into a grammar that applies after the bytes `after`.

        Raises InvalidRequestError for a form that is invalid, cannot be enforced, or is over a
        limit; EngineClosedError after `close`.
        """
        found = self.find(form, after)
        if found is not None:
            return found
        process = self._running()
        kind, source = form.source
        try:
            if kind == "json":
                compiled, size = self._json_grammars().compile(source, strict=form.strict)
                self._keep((kind, source, form.json_object, form.strict), compiled, size)
                return Grammar(compiled, after, self._json_grammars().matcher)
            _check_schemas(form)
            text = process.compile({"kind": kind, "source": source})
        except InvalidRequestError as error:
            raise InvalidRequestError(
                error.message, param=error.param or "structured_outputs", code=error.code
            ) from None
        import xgrammar

        compiled = xgrammar.CompiledGrammar.deserialize_json(text, self._info)
        size = int(_MEMORY_FACTOR * len(text)) + sys.getsizeof(source)
        self._keep((kind, source, form.json_object, form.strict), compiled, size)
        return Grammar(compiled, after, xgrammar.GrammarMatcher)

    def warm(self) -> None:
        """Start the compiling process and wait until it is ready. This takes seconds.

        Raises VlmServeError if it does not start, EngineClosedError after `close`.
        """
        self._running().start()
        self._json_grammars()

    def find(self, form: StructuredOutputs, after: bytes = b"") -> Grammar | None:
        """Return the grammar if it is cached. Does not block."""
        kind, source = form.source
        key = (kind, source, form.json_object, form.strict)
        with self._cache_lock:
            if key not in self._cached:
                return None
            self._cached.move_to_end(key)
            compiled, _ = self._cached[key]
        if kind == "json":
            return Grammar(compiled, after, self._json_grammars().matcher)
        import xgrammar

        return Grammar(compiled, after, xgrammar.GrammarMatcher)

    @property
    def num_bytes(self) -> int:
        """Memory of the cached grammars and their sources."""
        with self._cache_lock:
            return self._size()

    def close(self) -> None:
        """End the compiling process. May be called more than once."""
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _running(self) -> CompileProcess:
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            if self._process is None:
                self._process = self._new_process()
            return self._process

    def _json_grammars(self) -> JsonGrammars:
        with self._json_lock:
            if self._json is None:
                self._json = JsonGrammars(self._tokenizer, self._token_texts(), self._ends)
            return self._json

    def _token_texts(self) -> list[bytes]:
        """Return the bytes of all tokens.

        One without bytes never matches: control tokens, and logits without a token.
        """
        tokenizer, known = self._tokenizer, self._tokenizer.vocab_size
        return [
            b"" if token >= known or tokenizer.is_special(token) else tokenizer.token_bytes(token)
            for token in range(self._vocabulary)
        ]

    def _new_process(self) -> CompileProcess:
        import xgrammar

        self._info = xgrammar.TokenizerInfo(
            self._token_texts(),
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=self._vocabulary,
            stop_token_ids=self._ends,
            add_prefix_space=False,
        )
        return CompileProcess(self._info.serialize_json(), self._seconds)

    def _keep(self, key: tuple[str, str, bool, bool], compiled: Any, size: int) -> None:
        with self._cache_lock:
            self._cached[key] = compiled, size
            while len(self._cached) > CACHE_ENTRIES or self._size() > CACHE_BYTES:
                self._cached.popitem(last=False)

    def _size(self) -> int:
        """Return the bytes of the cached grammars and their sources."""
        return sum(size for _, size in self._cached.values())


def _check_schemas(form: StructuredOutputs) -> None:
    if form.structural_tag is not None:
        assert isinstance(form.structural_tag, Mapping)
        _check_tag(form.structural_tag)


def _check_tag(tag: Any) -> None:
    """Check the schemas anywhere in a structural tag. Its depth is bounded."""
    if isinstance(tag, Mapping):
        for name, value in tag.items():
            if name in ("json_schema", "schema"):
                check_schema(value, "structured_outputs")
            else:
                _check_tag(value)
    elif isinstance(tag, list | tuple):
        for value in tag:
            _check_tag(value)
