"""The compiling process, seen from the server: started on first use, killed when too slow."""

from __future__ import annotations

import contextlib
import json
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from vlm_serve.errors import EngineClosedError, InvalidRequestError, OverloadedError, VlmServeError
from vlm_serve.grammar.worker import MAX_MESSAGE_BYTES, send
from vlm_serve.system import child, children

START_SECONDS = 120.0
GRACE_SECONDS = 10.0
"""The process enforces the deadline of a grammar; this much later it is killed itself."""


class CompileProcess:
    """One process, one task at a time.

    Args:
        tokenizer: returns JSON of the tokens' bytes, as text in Latin-1, and the end-of-answer
            tokens.
        seconds: time limit per grammar.
    """

    def __init__(self, tokenizer: Callable[[], str], seconds: float) -> None:
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
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
        if "limit" in answer:
            what = f"compiling the grammar {answer['limit']}"
            raise InvalidRequestError(what, code="grammar_limit")
        if "error" in answer:
            raise InvalidRequestError(f"the grammar cannot be compiled: {answer['error']}")
        if "refused" in answer:
            raise InvalidRequestError(answer["refused"], param=answer["param"])
        return answer

    def start(self) -> None:
        """Start the process unless it runs, and wait until it can compile.

        Raises VlmServeError if it cannot be started; EngineClosedError after `close`.
        """
        with self._lock:
            if not self._make_ready():
                raise VlmServeError("the grammar compiler did not start")

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
            self._process = children.start(
                "vlm_serve.grammar.worker",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child.environment(OMP_NUM_THREADS="1"),
                start_new_session=True,  # the server handles Ctrl+C
            )
        except OSError:  # The machine lacks memory, files or a number for one more.
            return
        if self._closed:  # by another thread that did not see the process yet
            self._end()
            return
        assert self._process.stdin is not None
        try:
            send(self._process.stdin, {"tokenizer": self._tokenizer()})
        except OSError:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # unsent bytes of a task
            process.stdin.close()
        process.stdout.close()
        process.wait()

    def _exchange(self, task: dict[str, Any] | None, seconds: float) -> dict[str, Any] | None:
        """Send a task and read the answer. Without an answer, end the process and return None."""
        process = self._process
        if process is None:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        try:
            if task is not None:
                send(process.stdin, task)
            descriptor = process.stdout.fileno()
            length = struct.unpack("<I", _read(descriptor, 4, deadline))[0]
            if length > MAX_MESSAGE_BYTES:
                raise OSError("the grammar is too large")
            answer: dict[str, Any] = json.loads(_read(descriptor, length, deadline))
        except OSError:
            self._end()
            return None
        return answer


def _read(descriptor: int, count: int, deadline: float) -> bytes:
    """Read exactly `count` bytes. Raise TimeoutError at the deadline, OSError at the end."""
    data = bytearray()
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise TimeoutError
        chunk = os.read(descriptor, min(1 << 20, count - len(data)))
        if not chunk:
            raise OSError("the process ended")
        data += chunk
    return bytes(data)
