"""What Ray's processes write, as lines of the gateway's log.

Ray itself prints it, and waits for whoever reads that output. Serve's controller reports a dead
replica several times: with a traceback for each call that it had open, then in one sentence.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

_log = logging.getLogger("ray.processes")
_TIME = r"\d{4}-\d\d-\d\d [\d:,]+"
_RECORD = re.compile(rf"(?:{_TIME} )?(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
"""The beginning of a record, a replica's or Serve's; other lines continue the one before."""
_NEEDLESS = re.compile(r"Exception when trying to get \w+ stats")
_RAYS_OWN = "ray_print_logs"


class RayLog:
    """Receives the lines of Ray's processes, and logs the useful ones."""

    def __init__(self) -> None:
        self._levels: dict[object, int | None] = {}

    def install(self) -> None:
        """Take the place of Ray's own printing. Ray must run."""
        lines: Any = import_module("ray._private.ray_logging").global_worker_stdstream_dispatcher
        lines.remove_handler(_RAYS_OWN)
        lines.add_handler(_RAYS_OWN, self.receive)

    def receive(self, batch: Mapping[str, Any]) -> None:
        """Log the lines of one process.

        Args:
            batch: of Ray's log monitor: `lines`, the process's `pid`, and perhaps `actor_name`.
        """
        pid, name = batch.get("pid"), batch.get("actor_name") or "worker"
        for line in batch.get("lines", ()):
            level = self._level(pid, line)
            if level is not None:
                _log.log(level, "(%s pid=%s) %s", name, pid, line)

    def _level(self, pid: object, line: str) -> int | None:
        """Return the level of the record that a line is part of; None: it is not logged.

        A batch may end within a record.
        """
        begun = _RECORD.match(line)
        if begun is not None:
            needless = _NEEDLESS.search(line) is not None
            self._levels[pid] = None if needless else logging.getLevelNamesMapping()[begun[1]]
        return self._levels.get(pid, logging.WARNING)
