"""SIGUSR1 replaces the replicas one after the other, while the others answer."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Callable
from threading import Lock, Thread

_log = logging.getLogger(__name__)


class Restarts:
    """From now on the signal is obeyed; a second one waits for the end of the first restart.

    Args:
        run: starts replicas of a generation, which end those of older ones; it waits for them.
    """

    def __init__(self, run: Callable[[int], object]) -> None:
        self._run = run
        self._generations = itertools.count(1)
        self._turn = Lock()
        signal.signal(signal.SIGUSR1, lambda number, frame: self._begin())

    def _begin(self) -> None:
        Thread(target=self._restart, name="restart", daemon=True).start()

    def _restart(self) -> None:
        with self._turn:
            _log.info("replacing the replicas")
            try:
                self._run(next(self._generations))
            except Exception:
                _log.exception("the replicas could not be replaced")
            else:
                _log.info("all replicas are new")
