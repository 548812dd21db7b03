"""Logging that never blocks, whoever reads it: a pipe that nobody reads would stop the server.

A daemon thread writes the lines. Lines that do not fit into its bounded queue are dropped, counted,
and the count is written as soon as something is read again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
import time
from collections import deque

MAX_QUEUED_BYTES = 1 << 20
FLUSH_SECONDS = 1.0
"""Longest wait at the process's end for lines that are not written yet."""
_RETRY_SECONDS = 0.5
_PIECE_BYTES = select.PIPE_BUF
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_log = logging.getLogger(__name__)


class BackgroundHandler(logging.Handler):
    """Writes records to a descriptor in a thread of its own. `emit` never waits for the reader.

    Args:
        descriptor: where the lines go; it stays open.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_dropped = 0
        self._writing = False
        self._pid = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record, or drop it if too much is queued."""
        try:
            line = self.format(record).encode(errors="replace") + b"\n"
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            self._start()
            if self._num_bytes + len(line) > MAX_QUEUED_BYTES:
                self._num_dropped += 1
                return
            self._put(line)

    def flush(self) -> None:
        """Wait until all is written, for `FLUSH_SECONDS` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._lines or self._writing), FLUSH_SECONDS)

    def _put(self, line: bytes) -> None:
        self._lines.append(line)
        self._num_bytes += len(line)
        self._changed.notify_all()

    def _start(self) -> None:
        """Start the thread, also in a fork, which has none."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            threading.Thread(target=self._run, name="log", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
                self._num_bytes -= len(line)
                self._writing = True
            self._write(line)
            with self._changed:
                if self._num_dropped and not self._lines:
                    text = f"{self._num_dropped} lines of the log were not read in time, and lost"
                    self._num_dropped = 0
                    self._put(f"{text}\n".encode())

    def _write(self, line: bytes) -> None:
        """Write a line, or lose it where it cannot be written, such as on a full disk."""
        left = memoryview(line)
        while left:
            try:
                select.select([], [self._descriptor], [], _RETRY_SECONDS)
                left = left[os.write(self._descriptor, left[:_PIECE_BYTES]) :]
            except BlockingIOError:  # Others have made it non-blocking, such as a terminal.
                time.sleep(_RETRY_SECONDS)
            except (OSError, ValueError):
                return


def start_logging(level: str) -> None:
    """Log to standard error, with warnings and errors of threads, unless logging is set up.

    Args:
        level: the least level that is logged, such as "info".
    """
    root = logging.getLogger()
    if root.handlers:
        return
    handler: logging.Handler = logging.StreamHandler()
    with contextlib.suppress(OSError, AttributeError, ValueError):  # There may be no such output.
        handler = BackgroundHandler(sys.stderr.fileno())
        # Python writes these to standard error itself, and waits for its reader.
        logging.captureWarnings(True)
        threading.excepthook = _log_error
    handler.setFormatter(logging.Formatter(FORMAT))
    root.addHandler(handler)
    root.setLevel(level.upper())


def _log_error(raised: threading.ExceptHookArgs) -> None:
    if raised.exc_type is SystemExit or raised.exc_value is None:
        return
    name = raised.thread.name if raised.thread is not None else "a thread"
    _log.error("%s has failed", name, exc_info=raised.exc_value)
