"""Processes of all ranks but the first, seen from the engine, and the messages between both, over a
private socket pair."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

from vlm_serve.errors import EngineError
from vlm_serve.system import child, children
from vlm_serve.system.wire import ConnectionLostError, ReplyTimeoutError, Wire

START_SECONDS = 300.0
_END_SECONDS = 10.0
"""Time to wait for the exit status: an ending process closes its connection a little earlier."""


class RankProcess:
    """Process of one rank. It ends with the engine's process, whatever ends that.

    `send` and `receive` raise ConnectionLostError if the process has ended (the message says how),
    or ReplyTimeoutError with the rank's name.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        try:
            self._process = children.start(
                "vlm_serve.engine.steps.ranks.worker",
                str(theirs.fileno()),
                stdin=subprocess.PIPE,  # the rank ends when this closes
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=child.environment(),
                start_new_session=True,  # Ctrl-C is for the engine, which ends its ranks in order
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._wire = Wire(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, name: str, *arguments: Any) -> None:
        with self._named():
            self._wire.send(name, *arguments)

    def receive(self, seconds: float | None = None) -> Any:
        """Return the reply to the last message. Raise EngineError if the reply is an error."""
        with self._named():
            problem, value = self._wire.receive(seconds)
        if problem is not None:
            raise EngineError(f"rank {self.rank}: {problem}")
        return value

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ReplyTimeoutError:
            raise ReplyTimeoutError(f"rank {self.rank}") from None
        except ConnectionLostError:
            how = "has closed its connection"
            with contextlib.suppress(subprocess.TimeoutExpired):
                how = self.wait(_END_SECONDS)
            raise ConnectionLostError(f"rank {self.rank} {how}") from None

    def wait(self, seconds: float | None = None) -> str:
        """Wait for the process to end and describe its exit. Raise subprocess.TimeoutExpired on
        timeout."""
        return children.how_ended(self._process, seconds)

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._wire.close()


class RankProcesses:
    """All rank processes of an engine.

    Args:
        count: number of processes.
    """

    def __init__(self, count: int) -> None:
        self._all: list[RankProcess] = []
        self._lost: Callable[[str], None] = lambda sentence: None
        self._closing = False
        try:
            for rank in range(1, count + 1):
                self._all.append(RankProcess(rank))
        except OSError as error:
            self.close()
            raise EngineError(f"a rank could not be started: {error.strerror}") from None
        for process in self._all:
            threading.Thread(target=self._watch, args=(process,), daemon=True).start()

    def __iter__(self) -> Any:
        return iter(self._all)

    def watch(self, lost: Callable[[str], None]) -> None:
        """Call `lost` with a message, from another thread, when a process ends unexpectedly."""
        self._lost = lost

    def send(self, name: str, *arguments: Any) -> None:
        """Send a message to all processes. Raise as `RankProcess.send` does."""
        for process in self._all:
            process.send(name, *arguments)

    def receive(self, seconds: float | None = None) -> list[Any]:
        """Return the replies of all processes. Raise as `RankProcess.receive` does, but EngineError
        only after all have replied."""
        answers, problem = [], None
        for process in self._all:
            try:
                answers.append(process.receive(seconds))
            except EngineError as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return answers

    def ask(self, name: str, *arguments: Any, seconds: float | None = None) -> list[Any]:
        """Send a message to all processes and wait for their replies. Raise as `send` and `receive`
        do."""
        self.send(name, *arguments)
        return self.receive(seconds)

    def close(self) -> None:
        """Kill all processes."""
        self._closing = True
        for process in self._all:
            process.close()

    def _watch(self, process: RankProcess) -> None:
        how = process.wait()
        if not self._closing:
            self._lost(f"rank {process.rank} {how}")
