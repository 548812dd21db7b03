"""A server in a child process, queried over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

START_SECONDS, ANSWER_SECONDS = 600, 600
MEMORY_SECONDS = 0.2


class Unavailable(Exception):
    """A peer that cannot take part; the message says why, in one line."""


class Memory:
    """Watches what a process holds; its children, of which our server's decode media, are not seen.

    Attributes:
        own: most bytes of anonymous and shared memory at a time.
        all: most bytes with those of the files that it maps.
    """

    def __init__(self, pid: int) -> None:
        self.own = self.all = 0
        self._status = Path(f"/proc/{pid}/status")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(MEMORY_SECONDS):
            with suppress(OSError, KeyError):
                lines = (line.split() for line in self._status.read_text().splitlines())
                sizes = {words[0]: 1024 * int(words[1]) for words in lines if words[-1] == "kB"}
                own = sizes["RssAnon:"] + sizes["RssShmem:"]
                self.own = max(self.own, own)
                self.all = max(self.all, own + sizes["RssFile:"])

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


class Server:
    """A running server.

    Attributes:
        memory: what it held since its start.
    """

    def __init__(
        self, command: list[str], port: int, environment: dict[str, str], folder: Path | None
    ) -> None:
        self._address = f"http://127.0.0.1:{port}"
        self._log = tempfile.NamedTemporaryFile(prefix="peer-", suffix=".log")  # noqa: SIM115
        # A session of its own: its workers end with it.
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.memory = Memory(self._process.pid)

    def wait_until_ready(self) -> None:
        """Returns when it is healthy. Raises Unavailable if it ends or takes too long."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise Unavailable(f"it ended at start-up: {self._last_words()}")
            try:
                with urllib.request.urlopen(f"{self._address}/health", timeout=5):
                    return
            except OSError:
                time.sleep(1)
        raise Unavailable(f"not ready after {START_SECONDS} s: {self._last_words()}")

    def post(self, path: str, body: dict[str, Any]) -> tuple[Any, float]:
        """The answer to a request, and the seconds from sending it to having read it all."""
        request = urllib.request.Request(
            self._address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        begin = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path} answered {error.code}: {error.read()[:500]!r}") from error
        return json.loads(text), time.perf_counter() - begin

    def processor_seconds(self) -> float:
        """What all threads of its process have computed since it began."""
        # The clock of a process in Linux' numbering: its inverted id, with the kind of clock below.
        return time.clock_gettime((~self._process.pid << 3) | 2)

    def stop(self) -> None:
        self.memory.end()
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._signal(signal.SIGKILL)  # Workers that outlived their parent, too.
        self._process.wait()
        self._log.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        lines = Path(self._log.name).read_text(errors="replace").strip().splitlines()
        return lines[-1][-300:] if lines else "it printed nothing"


@contextmanager
def running(
    command: list[str], port: int, environment: dict[str, str], folder: Path | None = None
) -> Iterator[Server]:
    """The server of that command, once it is healthy. Raises Unavailable."""
    server = Server(command, port, environment, folder)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def words(flags: dict[str, Any]) -> list[str]:
    """Flags and their values as a command has them."""
    return [str(word) for flag in flags.items() for word in flag]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
