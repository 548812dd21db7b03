"""Compiles and caches the grammars of one model, bounded in time and memory.

The process that compiles is started on first use, and killed when too slow.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, Pipe
from typing import Any

from vlm_serve.errors import EngineClosedError, InvalidRequestError, OverloadedError
from vlm_serve.grammar.library import Library
from vlm_serve.grammar.state import Compiled, Grammar
from vlm_serve.grammar.worker import MAX_MESSAGE_BYTES, send
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.structured_outputs import StructuredOutputs
from vlm_serve.system import child, children

COMPILE_SECONDS = 5.0
CACHE_BYTES = 128 << 20
CACHE_ENTRIES = 256
_LEAST_BYTES = 64 << 10
_BYTES_PER_BYTE = 24
"""Bytes of memory per byte of a source at least, where the C library cannot be asked."""
_Key = tuple[bytes, str, str, bool, bool]


START_SECONDS = 120.0
GRACE_SECONDS = 10.0
"""The process enforces the deadline of a grammar; this much later it is killed itself."""


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
        """Compile a form into a grammar that applies behind the bytes `after`, see `Grammar`.

        Grammars of different owners are compiled and kept apart: how long one takes would tell
        whether somebody else has used it.

        Raises InvalidRequestError for a form that is invalid, cannot be enforced, or is over a
        limit; EngineClosedError after `close`.
        """
        earlier = self.find(form, after, owner)
        if earlier is not None:
            return earlier
        kind, source = form.source
        answer = self._process.compile({"kind": kind, "source": source, "strict": form.strict})
        compiled = Compiled(self._library(), answer["grammar"], answer["lengths"])
        size = max(_LEAST_BYTES, _BYTES_PER_BYTE * len(source), answer["size"])
        self._keep(_key(form, owner), compiled, size + sys.getsizeof(source))
        return Grammar(compiled, after)

    def warm(self) -> None:
        """Start the compiling process and wait until it is ready. This takes seconds.

        Raises OverloadedError if it does not start, EngineClosedError after `close`.
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

    def _tokens(self) -> list[Any]:
        """Return the vocabulary as the compiling process takes it."""
        return [[text.decode("latin-1") for text in self._token_texts()], self._ends]

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


class CompileProcess:
    """One process, one task at a time.

    Args:
        tokenizer: returns the tokens' bytes, as text in Latin-1, and the end-of-answer tokens.
        seconds: time limit per grammar.
    """

    def __init__(self, tokenizer: Callable[[], list[Any]], seconds: float) -> None:
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection
        self._ready = False
        self._closed = False

    def compile(self, task: dict[str, Any]) -> dict[str, Any]:
        """Compile a task and return the grammar, see `worker`. Waits for its turn.

        A process that ends meanwhile, also while it starts, is no fault of the source: another one
        gets the task, once. So does another child of the process if the first one was killed. A
        start that takes all its time is not repeated.

        Raises InvalidRequestError for a source that is invalid, too slow or too large to compile;
        OverloadedError if two processes end or one does not start; EngineClosedError after `close`.
        """
        with self._lock:
            task = task | {"seconds": self._seconds}
            begun = time.monotonic()
            answer = self._tried(task)
            if answer is None and time.monotonic() - begun < START_SECONDS:
                answer = self._tried(task)
            if answer is None and not self._closed:
                self._start()  # warm for the next task
        if answer is None:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            raise OverloadedError(
                "the grammar compiler was ended, twice, or did not start: try again later"
            )
        if "refused" in answer:
            raise InvalidRequestError(**answer["refused"])
        return answer

    def start(self) -> None:
        """Start the process unless it runs, and wait until it can compile.

        Raises OverloadedError if it cannot be started, twice; EngineClosedError after `close`.
        """
        with self._lock:
            if not (self._make_ready() or self._make_ready()):
                raise OverloadedError("the grammar compiler did not start")

    def close(self) -> None:
        """Kill the process; a running task fails."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _tried(self, task: dict[str, Any]) -> dict[str, Any] | None:
        ready = self._make_ready()
        answer = self._exchange(task, self._seconds + GRACE_SECONDS) if ready else None
        return None if answer is None or "ended" in answer else answer

    def _make_ready(self) -> bool:
        """Return False if the process has ended or took too long. Raise EngineClosedError."""
        self._start()
        if not self._ready:
            self._ready = self._exchange(None, START_SECONDS) is not None
        if self._closed:
            raise EngineClosedError("the engine is closed")
        return self._ready

    def _start(self) -> None:
        if self._process is not None or self._closed:
            return
        self._ready = False
        try:
            ours, theirs = Pipe()
            with theirs:
                self._process = children.start(
                    "vlm_serve.grammar.worker",
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=child.environment(OMP_NUM_THREADS="1"),
                    start_new_session=True,  # the server handles Ctrl+C
                )
        except OSError:  # The machine lacks memory, files or a number for one more.
            return
        self._connection = ours
        if self._closed:  # by another thread that did not see the process yet
            self._end()
            return
        try:
            send(ours, {"tokenizer": self._tokenizer()})
        except OSError:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            self._connection.close()
            process.wait()

    def _exchange(self, task: dict[str, Any] | None, seconds: float) -> dict[str, Any] | None:
        """Send a task and read the answer. Without an answer, end the process and return None."""
        process = self._process
        if process is None:
            return None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            if task is not None:
                send(self._connection, task)
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
        except (OSError, EOFError):
            self._end()
            return None
        finally:
            timer.cancel()
        return answer
