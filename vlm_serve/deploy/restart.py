"""Rolling restart: SIGUSR1 replaces the replicas one by one while the others answer."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Callable
from threading import Lock, Thread

_log = logging.getLogger(__name__)


class Restarts:
    """Installs the signal handler. A second signal waits for the end of the first restart.

    Args:
        run: starts the replicas of a generation, which replace older ones, and waits for them.
    """

    def __init__(self, run: Callable[[int], object]) -> None:
        self._run = run
        self._generations = itertools.count(1)
        self._restarting = Lock()
        signal.signal(signal.SIGUSR1, lambda number, frame: self._begin())

    def _begin(self) -> None:
        Thread(target=self._restart, name="restart", daemon=True).start()

    def _restart(self) -> None:
        with self._restarting:
            _log.info("replacing the replicas")
            try:
                self._run(next(self._generations))
            except Exception:
                _log.exception("the replicas could not be replaced")
            else:
                _log.info("all replicas have been replaced")
