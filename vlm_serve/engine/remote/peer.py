"""One end of the connection between an engine's process and the one that asks it.

What is told while a message is being sent goes with the next one. So there is about one a step in
each direction, however many requests there are.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vlm_serve.errors import EngineClosedError, EngineError, VlmServeError
from vlm_serve.system.wire import ConnectionLostError, ReplyTimeoutError, Wire

_log = logging.getLogger(__name__)
_THREADS = 32
QUIET_SECONDS = 10.0


class Peer:
    """Tells and asks the other side. `tell` and `ask` are for any thread.

    Args:
        wire: the connection.
        state: returns a message that each batch ends with; None: there is none.

    Attributes:
        told: what is done when the other side tells something, by the message's name; on the
            receiving thread, so it must not wait.
        asked: the same for what it asks, with a result and on a thread of its own.
    """

    def __init__(self, wire: Wire, state: Callable[[], tuple[Any, ...]] | None = None) -> None:
        self.told: dict[str, Callable[..., None]] = {}
        self.asked: dict[str, Callable[..., Any]] = {}
        self.told |= {"ask": self._answer_later, "reply": self._take_reply}
        self._wire, self._state = wire, state
        self._outbox: deque[tuple[Any, ...]] = deque()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lost = False
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="vlm-serve-calls")
        self._sender = threading.Thread(target=self._send, name="vlm-serve-send", daemon=True)
        self._sender.start()

    def add(self, *message: Any) -> None:
        """Tell something with the next batch; `flush` has to follow."""
        if not self._lost:
            self._outbox.append(message)

    def flush(self) -> None:
        """Send what has been added."""
        self._wake.put(True)

    def tell(self, *message: Any) -> None:
        """Tell something at once. What nobody can be told any more is lost."""
        self.add(*message)
        self.flush()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Ask for a result, and wait for it.

        Raises what the other side raises, and EngineClosedError if it is gone.
        """
        return self.begin_to_ask(name, *arguments).result()

    def begin_to_ask(self, name: str, *arguments: Any) -> Future[Any]:
        """Ask for a result; what `ask` raises is the future's."""
        number, future = next(self._numbers), Future[Any]()
        self._waiting[number] = future
        if self._lost:
            self._give_up()
        self.tell("ask", number, name, arguments)
        return future

    def later(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function that may wait on another thread than the receiving one."""
        self._pool.submit(function, *arguments)

    def receive(
        self,
        on_batch: Callable[[], None] = lambda: None,
        on_quiet: Callable[[], None] | None = None,
    ) -> None:
        """Do what the other side says, until it is gone.

        Args:
            on_batch: called behind each batch.
            on_quiet: called once after QUIET_SECONDS without one.
        """
        quiet = on_quiet is None
        try:
            while True:
                try:  # no variable keeps what a batch had while this waits for the next one
                    self._do(self._wire.receive(None if quiet else QUIET_SECONDS))
                except ReplyTimeoutError:
                    assert on_quiet is not None
                    on_quiet()
                    quiet = True
                    continue
                quiet = on_quiet is None
                on_batch()
        except ConnectionLostError:
            pass
        except Exception:
            _log.exception("a message cannot be read")
        self._lost = True
        self._give_up()

    def _do(self, batch: tuple[Any, ...]) -> None:
        for name, *arguments in batch:
            try:
                self.told[name](*arguments)
            except Exception:
                _log.exception("the message %s has failed", name)

    def close(self) -> None:
        """Send what is left, and close the connection."""
        self._wake.put(False)
        self._sender.join()
        self._wire.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _send(self) -> None:
        open_ = True
        while open_:
            open_ = self._wake.get()
            while not self._wake.empty():
                open_ &= self._wake.get()
            try:
                self._wire.send(*self._batch())
            except ConnectionLostError:
                return
            except Exception:
                _log.exception("a message cannot be sent")
                self._wire.close()
                return

    def _batch(self) -> list[tuple[Any, ...]]:
        """Take all that has been added."""
        batch = list[tuple[Any, ...]]()
        while self._outbox:
            batch.append(self._outbox.popleft())
        if self._state is not None:
            batch.append(self._state())
        return batch

    def _answer_later(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        self.later(self._answer, number, name, arguments)

    def _answer(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        error, value = None, None
        try:
            value = self.asked[name](*arguments)
        except Exception as raised:
            error = portable(raised)
        self.tell("reply", number, error, value)

    def _take_reply(self, number: int, error: Exception | None, value: Any) -> None:
        future = self._waiting.pop(number, None)
        if future is None:
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def _give_up(self) -> None:
        with contextlib.suppress(KeyError):  # all are told
            while True:
                _, future = self._waiting.popitem()
                error = EngineClosedError("the engine is closed", code="engine_stopped")
                future.set_exception(error)


def portable(error: Exception) -> Exception:
    """Return an error that another process can read."""
    if isinstance(error, VlmServeError | AssertionError | MemoryError):
        return error
    _log.error("a call of another process has failed", exc_info=error)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return EngineError(f"{type(error).__name__}: {error}")
    return error
